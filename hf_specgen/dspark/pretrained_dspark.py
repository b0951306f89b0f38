"""DSparkPreTrainedModel: how drafters are loaded and saved, in every layout. Knows tensors by name only."""

import os
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils.loading_report import LoadStateDictInfo

from .calibration import Calibration
from .configuration_dspark import DSparkConfig
from .storage import load_calibration, load_threshold, rewrite_saved

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
    confidence_threshold: float
    calibration: Calibration | None

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
        model.confidence_threshold = load_threshold(pretrained_model_name_or_path, hub)
        if model.confidence_threshold > 0 and not model.config.enable_confidence_head:
            raise ValueError(
                f"The checkpoint's `assistant_confidence_threshold` of {model.confidence_threshold} needs a "
                "confidence head, but the drafter has none."
            )
        model.calibration = load_calibration(pretrained_model_name_or_path, model.config.num_candidates, hub)
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

    def save_pretrained(self, save_directory: str | os.PathLike, layout: str = "released", **kwargs: Any) -> None:
        """
        Saves the drafter with its threshold and calibration.

        Args:
            save_directory (`str` or `os.PathLike`):
                The folder.
            layout (`str`, *optional*, defaults to `"released"`):
                `"released"` for vLLM, SGLang and others, `"speculators"`, or `"dspark"`, which `AutoModel` knows.

        Raises:
            `ValueError`: if the layout cannot express this drafter.
        """
        if kwargs.get("push_to_hub"):
            raise ValueError("`push_to_hub` would send a half-written folder: call `model.push_to_hub(name)` instead.")
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
            rewrite_saved(save_directory, contents, self.confidence_threshold, self.calibration)


def _with_own_memory(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Files hold no shared tensors, but embedding and head of a tied target may be one."""
    tables = [state_dict.get(name) for name in TABLES]
    if any(table is None for table in tables) or tables[0].data_ptr() != tables[1].data_ptr():  # type: ignore[union-attr]
        return state_dict
    return state_dict | {TABLES[1]: state_dict[TABLES[1]].clone()}
