"""StopFinder: stop strings in text that arrives character by character. Knows no tokens."""

from weakref import WeakValueDictionary

NUM_CHARACTERS = 0x110000  # of Unicode


class StopFinder:
    """
    Finds stop strings in text that arrives character by character, all at once and in constant time per character
    (Aho and Corasick 1975, "Efficient string matching"). A state stands for the longest end of the text that begins a
    stop string.

    Attributes:
        depths (`list[int]`): per state how much of that end may still become a stop string.
        stops (`list[str | None]`): per state the longest stop string that the text ends in.
    """

    def __init__(self, stops: tuple[str, ...]):
        self.depths = [0]
        self.stops: list[str | None] = [None]
        self._following: dict[int, int] = {}  # by state and character
        for stop in stops:
            state = 0
            for depth, character in enumerate(stop, start=1):
                key = _key(state, character)
                if key not in self._following:
                    self._following[key] = len(self.depths)
                    self.depths.append(depth)
                    self.stops.append(None)
                state = self._following[key]
            self.stops[state] = stop
        self._shorter = [0] * len(self.depths)  # per state the next shorter end that begins a stop string
        is_leaf = [True] * len(self.depths)
        # From the root outwards: what is shorter is then complete.
        for key, state in sorted(self._following.items(), key=lambda item: self.depths[item[1]]):
            parent, code = divmod(key, NUM_CHARACTERS)
            is_leaf[parent] = False
            if parent:
                self._shorter[state] = self.step(self._shorter[parent], chr(code))
            if self.stops[state] is None:
                self.stops[state] = self.stops[self._shorter[state]]
        for state in sorted(range(len(self.depths)), key=self.depths.__getitem__):
            if is_leaf[state]:
                self.depths[state] = self.depths[self._shorter[state]]

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while state and _key(state, character) not in self._following:
            state = self._shorter[state]
        return self._following.get(_key(state, character), 0)


def _key(state: int, character: str) -> int:
    return state * NUM_CHARACTERS + ord(character)


# One finder for all rows with these stop strings, which remembers nothing of a text, as long as one of them is there.
_finders: "WeakValueDictionary[tuple[str, ...], StopFinder]" = WeakValueDictionary()


def stop_finder(stops: tuple[str, ...]) -> StopFinder:
    finder = _finders.get(stops)
    if finder is None:
        finder = _finders.setdefault(stops, StopFinder(stops))
    return finder
