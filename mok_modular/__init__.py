"""mok_modular: expert-parallel mixture-of-experts layers from modular stages.

Every stage is a kernel of its own, or all of them are one persistent kernel, from the same stage code and
with the same bits. See README.md for ten lines that run, docs/design.md for how it is built.
"""

from mok_modular import functional, ops, reference, stages, testing
from mok_modular.calls.workspace import Workspace
from mok_modular.config import PRESETS, MoEShape, MoKConfig
from mok_modular.copies import broadcast_copies, clip_grad_norm_
from mok_modular.functional import MoKForwardContext, MoKSchedule
from mok_modular.layer import MoE
from mok_modular.protocol.errors import MoKDeadlockError, MoKPeerError, MoKSignalError, MoKTimeoutError
from mok_modular.protocol.plan import Plan
from mok_modular.ranks.group import LocalGroup, LocalMember
from mok_modular.routing import Routing, load_routing
from mok_modular.routing_capture import capture_routing

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "LocalGroup",
    "LocalMember",
    "MoE",
    "MoEShape",
    "MoKConfig",
    "MoKDeadlockError",
    "MoKForwardContext",
    "MoKPeerError",
    "MoKSchedule",
    "MoKSignalError",
    "MoKTimeoutError",
    "Plan",
    "Routing",
    "Workspace",
    "broadcast_copies",
    "capture_routing",
    "clip_grad_norm_",
    "functional",
    "load_routing",
    "ops",
    "reference",
    "stages",
    "testing",
]
