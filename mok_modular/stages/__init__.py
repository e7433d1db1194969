"""The stages of the layer, one module each: ``reference`` is the stage in plain torch, ``launch`` its kernel alone."""

import importlib
import pkgutil

__all__ = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "tables")
"""Every module of this folder that is a stage."""

for _name in __all__:
    importlib.import_module(f"{__name__}.{_name}")
