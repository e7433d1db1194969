"""How a layer runs (`MoKConfig`), how large it is (`MoEShape`), and the sizes of known models (`PRESETS`)."""

from mok_modular.protocol.config import DEFAULT_ROW_BLOCK, MAX_TOPK, PRESETS, MoEShape, MoKConfig

__all__ = ["DEFAULT_ROW_BLOCK", "MAX_TOPK", "PRESETS", "MoEShape", "MoKConfig"]
