"""DSparkPreTrainedModel: how drafters are loaded and saved, in every layout. Knows tensors by name only."""

import os
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils.loading_report import LoadStateDictInfo

from .calibration import Calibration
from .configuration import DSparkConfig
from .storage import check_threshold, load_calibration, load_generation_settings, rewrite_saved

TABLES = ("embed_tokens.weight", "lm_head.weight")  # which a checkpoint may leave to the target
HUB_KWARGS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


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
        self._confidence_threshold = check_threshold(threshold)

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
        own. Threshold and calibration files beside it are read.

        Raises:
            `ValueError`: if tensors are missing, unexpected or misshapen, naming them, or a file does not fit.
        """
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        hub: dict[str, Any] = {name: kwargs[name] for name in HUB_KWARGS if name in kwargs}
        settings = load_generation_settings(pretrained_model_name_or_path, hub)
        model.confidence_threshold = settings.get("assistant_confidence_threshold") or 0.0
        if (count := settings.get("num_assistant_tokens")) is not None:
            model.generation_config.num_assistant_tokens = model.config.checked_num_assistant_tokens(count)
        if model.confidence_threshold > 0 and not model.config.enable_confidence_head:
            raise ValueError(
                f"The checkpoint's `assistant_confidence_threshold` of {model.confidence_threshold} needs a "
                "confidence head, but the drafter has none."
            )
        model.calibration = load_calibration(pretrained_model_name_or_path, hub)
        model.check_reduced_vocabulary()
        return loaded

    def _tables(self) -> set[str]:
        """The tensors that this drafter may take from its target."""
        return set(TABLES if self.config.draft_vocab_size is None else TABLES[:1])

    def _adjust_missing_and_unexpected_keys(self, loading_info: LoadStateDictInfo) -> None:
        super()._adjust_missing_and_unexpected_keys(loading_info)
        for name in loading_info.missing_keys & self._tables():
            setattr(self, name.removesuffix(".weight"), None)
        loading_info.missing_keys -= self._tables()
        problems = {
            "missing": sorted(loading_info.missing_keys),
            "unexpected": sorted(loading_info.unexpected_keys),
            "misshapen": [f"{name} {tuple(a)} instead of {tuple(b)}" for name, a, b in loading_info.mismatched_keys],
        }
        loading_info.mismatched_keys.clear()  # else transformers raises its own error in place of this one
        if found := [f"{what}: {', '.join(names)}" for what, names in problems.items() if names]:
            raise ValueError(f"The checkpoint does not hold the tensors of its configuration; {'; '.join(found)}.")

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
        super().save_pretrained(save_directory, **kwargs)
        if kwargs.get("is_main_process", True):
            if layout == "dspark":
                contents["architectures"] = [type(self).__name__]
            rewrite_saved(save_directory, contents, self._generation_settings(), self.calibration)

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
