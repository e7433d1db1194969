"""How a layer runs (`MoKConfig`), how large it is (`MoEShape`), and the sizes of known models (`PRESETS`)."""

from mok_modular.protocol.config import DEFAULT_ROW_BLOCK, MoKConfig
from mok_modular.protocol.shapes import MAX_TOPK, PRESETS, MoEShape

__all__ = ["DEFAULT_ROW_BLOCK", "MAX_TOPK", "PRESETS", "MoEShape", "MoKConfig"]
