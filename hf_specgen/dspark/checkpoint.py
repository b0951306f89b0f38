"""DSparkPreTrainedModel: how drafters are loaded and saved, in every layout. Knows tensors by name only."""

import copy
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME
from transformers.utils.loading_report import LoadStateDictInfo

from ..arguments import checked_probability
from .calibration import CALIBRATION_FILE, Calibration
from .checkpoint_files import HUB_KWARGS, TensorHeader, found_file, read_headers, read_json_object, write_text
from .configuration import DSparkConfig

TABLES = ("embed_tokens.weight", "lm_head.weight")  # which a checkpoint may leave to the target
SIDECARS = (GENERATION_CONFIG_NAME, CALIBRATION_FILE)
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
TYPES_OF_MAPS = {"d2t": ("I64", "I32"), "t2d": ("BOOL",)}
MOST_NAMES = 40  # in one sentence


class DSparkPreTrainedModel(PreTrainedModel):
    """Loading and saving of [`DSparkModel`]."""

    config: DSparkConfig
    config_class = DSparkConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _supports_sdpa = True
    _no_split_modules = ["DSparkLayer"]
    _keys_to_ignore_on_load_unexpected = {r"^verifier_(lm_head|norm)\.", r"rotary_emb\.inv_freq$"}
    _confidence_threshold: float = 0.0
    _calibration: Calibration | None = None

    @property
    def confidence_threshold(self) -> float:
        """Candidates are verified up to the first whose confidence is below this; in [0, 1], and 0 verifies all."""
        return self._confidence_threshold

    @confidence_threshold.setter
    def confidence_threshold(self, threshold: float) -> None:
        self._confidence_threshold = checked_probability("assistant_confidence_threshold", threshold)

    @property
    def calibration(self) -> Calibration | None:
        """Temperatures of the confidence head, for blocks of this drafter's size."""
        return self._calibration

    @calibration.setter
    def calibration(self, calibration: Calibration | None) -> None:
        if calibration is not None:
            calibration.check_block_size(self.config.num_candidates)
        self._calibration = calibration

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
        """
        Loads a drafter in any published layout: released (DeepSeek), speculators, z-lab's DFlash, or this package's
        own. Threshold and calibration files beside it are read. Only safetensors are opened, and the configuration is
        compared with their headers before anything is built.

        Raises:
            `ValueError`: if tensors are missing, unexpected, misshapen, of another kind or not finite, naming them, or
                a file does not fit.
        """
        name = pretrained_model_name_or_path
        if kwargs.pop("use_safetensors", None) is False:
            raise ValueError("`use_safetensors` is False, but drafters are read from safetensors only.")
        hub: dict[str, Any] = {key: kwargs[key] for key in HUB_KWARGS if key in kwargs}
        if os.path.isdir(name) and found_file(name, "adapter_config.json", hub) is not None:
            raise ValueError(
                f"`{name}` holds an adapter (adapter_config.json): merge it into the drafter and save that."
            )
        config = kwargs.get("config")
        if not isinstance(config, DSparkConfig):
            config = DSparkConfig.from_pretrained(name if config is None else config, **hub)
        settings = _read_generation_settings(name, hub, config)
        calibration = _read_calibration(name, hub, config)
        if kwargs.get("state_dict") is None:
            headers = read_headers(name, hub, kwargs.get("variant"))
            if headers is not None:
                cls._check_headers(config, headers)
        loaded = super().from_pretrained(name, *args, use_safetensors=True, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model._check_values()
        model.confidence_threshold = settings.get("assistant_confidence_threshold") or 0.0
        if (count := settings.get("num_assistant_tokens")) is not None:
            model.generation_config.num_assistant_tokens = count
        model.calibration = calibration
        return loaded

    @classmethod
    def _check_headers(cls, config: DSparkConfig, headers: dict[str, TensorHeader]) -> None:
        """Raises `ValueError` if the files do not hold the tensors of the configuration, which takes no memory."""
        for name, header in headers.items():
            if header.dtype not in TYPES_OF_MAPS.get(name, FLOAT_TYPES) and not cls._is_ignored(name):
                raise ValueError(f"`{name}` of `{header.file}` has to hold fractions, but is of type {header.dtype}.")
        try:
            with torch.device("meta"):
                model = cls(copy.deepcopy(config))
        except RuntimeError as error:  # sizes whose product is no integer of 64 bits
            sizes = "`hidden_size`, `intermediate_size`, `vocab_size` or `markov_rank`"
            raise ValueError(f"The {sizes} of the configuration cannot be a drafter's: {error}.") from error
        expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        names = {name.removeprefix(f"{cls.base_model_prefix}."): name for name in headers if not cls._is_ignored(name)}
        found = {name: headers[in_file].shape for name, in_file in names.items()}
        both = sorted(expected.keys() & found.keys())
        _refuse(
            missing=sorted(expected.keys() - found.keys() - model._tables()),
            unexpected=sorted(names[name] for name in found.keys() - expected.keys()),
            misshapen=[f"{n} {found[n]} instead of {expected[n]}" for n in both if found[n] != expected[n]],
        )

    @classmethod
    def _is_ignored(cls, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in cls._keys_to_ignore_on_load_unexpected)

    def _check_values(self) -> None:
        """Raises `ValueError` if a loaded tensor holds numbers that are not finite, or the tables do not fit."""
        for name, tensor in self.state_dict().items():
            if tensor.is_floating_point() and not tensor.is_meta and not bool(tensor.isfinite().all()):
                raise ValueError(f"`{name}` of the checkpoint holds NaN or infinite numbers in {tensor.dtype}.")
        self.check_reduced_vocabulary()

    def _tables(self) -> set[str]:
        """The tensors that this drafter may take from its target."""
        return set(TABLES if self.config.draft_vocab_size is None else TABLES[:1])

    def _adjust_missing_and_unexpected_keys(self, loading_info: LoadStateDictInfo) -> None:
        super()._adjust_missing_and_unexpected_keys(loading_info)
        for name in loading_info.missing_keys & self._tables():
            setattr(self, name.removesuffix(".weight"), None)
        loading_info.missing_keys -= self._tables()
        misshapen = [f"{name} {tuple(a)} instead of {tuple(b)}" for name, a, b in loading_info.mismatched_keys]
        loading_info.mismatched_keys.clear()  # else transformers raises its own error in place of this one
        _refuse(sorted(loading_info.missing_keys), sorted(loading_info.unexpected_keys), misshapen)

    def check_reduced_vocabulary(self) -> None:
        """Raises `ValueError` if the tables of a reduced vocabulary do not fit together."""
        if self.config.draft_vocab_size is None:
            return
        target_ids = self.target_ids()
        is_drafted = torch.zeros(self.config.vocab_size, dtype=torch.bool, device=target_ids.device)
        is_inside = bool(((target_ids >= 0) & (target_ids < self.config.vocab_size)).all())
        if is_inside:
            is_drafted[target_ids] = True
        if not is_inside or int(is_drafted.sum()) < len(target_ids) or not torch.equal(is_drafted, self.t2d):
            raise ValueError(
                f"`d2t` has to give {len(target_ids)} different ids below the `vocab_size` of "
                f"{self.config.vocab_size}, those that `t2d` marks, but does not."
            )

    def save_pretrained(self, save_directory: str | os.PathLike, layout: str | None = None, **kwargs: Any) -> None:
        """
        Saves the drafter with its threshold and calibration.

        Args:
            save_directory (`str` or `os.PathLike`):
                The folder.
            layout (`str`, *optional*):
                `"released"` for vLLM, SGLang and others, `"speculators"`, or `"dspark"`, which `AutoModel` knows and
                which can express every drafter. By default the first, or the last where that one cannot.

        Raises:
            `ValueError`: if the layout cannot express this drafter.
        """
        if kwargs.get("push_to_hub"):
            raise ValueError("`push_to_hub` would send a half-written folder: call `model.push_to_hub(name)` instead.")
        layout = self._default_layout() if layout is None else layout
        contents = self.config.to_layout(layout)
        contents["dtype"] = str(self.dtype).removeprefix("torch.")
        state_dict = self.state_dict() if kwargs.get("state_dict") is None else kwargs["state_dict"]
        if layout == "speculators":
            state_dict = {name: tensor for name, tensor in state_dict.items() if name not in self._tables()}
        elif layout == "released" and not state_dict.keys() >= set(TABLES):
            raise ValueError(
                "The released layout holds embedding and head, which this drafter takes from its target: call "
                "`share_weights(target)` first."
            )
        kwargs["state_dict"] = _with_own_memory(state_dict)
        if not kwargs.get("is_main_process", True):
            super().save_pretrained(save_directory, **kwargs)
            return
        if layout == "dspark":
            contents["architectures"] = [type(self).__name__]
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as part:
            super().save_pretrained(part, **kwargs)
            write_text(Path(part, CONFIG_NAME), json.dumps(contents, indent=2, sort_keys=True, default=str) + "\n")
            if settings := self._generation_settings():
                GenerationConfig(**settings).save_pretrained(part)
            if self.calibration is not None:
                self.calibration.save(part)
            _replace_checkpoint(folder, Path(part), kwargs.get("variant"))

    def _default_layout(self) -> str:
        try:
            self.config.to_layout("released")
        except ValueError:
            return "dspark"
        return "released"

    def _generation_settings(self) -> dict[str, Any]:
        """What differs from the defaults of a drafter's generation config."""
        count = self.generation_config.num_assistant_tokens
        settings = {
            "assistant_confidence_threshold": self.confidence_threshold or None,
            "num_assistant_tokens": None if count == self.config.num_candidates else count,
        }
        return {name: value for name, value in settings.items() if value is not None}


def _with_own_memory(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Files hold no shared tensors, but embedding and head of a tied target may be one."""
    tables = [state_dict.get(name) for name in TABLES]
    if any(table is None for table in tables) or tables[0].data_ptr() != tables[1].data_ptr():  # type: ignore[union-attr]
        return state_dict
    return state_dict | {TABLES[1]: state_dict[TABLES[1]].clone()}


def _read_generation_settings(
    folder: str | os.PathLike, hub_kwargs: dict[str, Any], config: DSparkConfig
) -> dict[str, Any]:
    """A checkpoint's generation_config.json, checked; nothing if there is none."""
    path = found_file(folder, GENERATION_CONFIG_NAME, hub_kwargs)
    if path is None:
        return {}
    settings = read_json_object(path)
    threshold, count = settings.get("assistant_confidence_threshold"), settings.get("num_assistant_tokens")
    try:
        if threshold is not None:
            checked_probability("assistant_confidence_threshold", threshold)
        if count is not None:
            config.checked_num_assistant_tokens(count)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{path}` holds no usable settings: {error}") from error
    if threshold and not config.enable_confidence_head:
        raise ValueError(
            f"The `assistant_confidence_threshold` of {threshold} in `{path}` needs a confidence head, but the "
            "drafter has none."
        )
    return settings


def _read_calibration(
    folder: str | os.PathLike, hub_kwargs: dict[str, Any], config: DSparkConfig
) -> Calibration | None:
    """The calibration beside a checkpoint, None if there is none."""
    path = found_file(folder, CALIBRATION_FILE, hub_kwargs)
    if path is None:
        return None
    calibration = Calibration.load(path)
    try:
        calibration.check_block_size(config.num_candidates)
    except ValueError as error:
        raise ValueError(f"`{path}` is not for this drafter: {error}") from error
    return calibration


def _refuse(missing: list[str], unexpected: list[str], misshapen: list[str]) -> None:
    problems = {"missing": missing, "unexpected": unexpected, "misshapen": misshapen}
    found = [f"{what}: {_listed(names)}" for what, names in problems.items() if names]
    if found:
        raise ValueError(f"The checkpoint does not hold the tensors of its configuration; {'; '.join(found)}.")


def _listed(names: list[str]) -> str:
    more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return ", ".join([*names[:MOST_NAMES], *more])


def _replace_checkpoint(folder: Path, part: Path, variant: str | None) -> None:
    """
    Moves the files of a finished checkpoint into a folder that may hold an older one. Interrupted at any point it
    leaves a folder without config.json, which is refused, but no mixture of the two.
    """
    for name in (CONFIG_NAME, *SIDECARS):
        (folder / name).unlink(missing_ok=True)
    stem = re.escape("model" if variant is None else f"model.{variant}")
    of_weights = re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?")
    for path in folder.iterdir():
        if of_weights.fullmatch(path.name):
            path.unlink()
    for path in sorted(part.iterdir(), key=lambda path: path.name == CONFIG_NAME):
        os.replace(path, folder / path.name)
