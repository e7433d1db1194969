"""Trains a small byte-level mixture-of-experts language model on CPU ranks, and can keep what its routers chose.

The text is the Python language reference that every CPython carries (about 370 KB of English), so nothing is
downloaded; its last tenth is held out. Every rank runs `train_rank` in a thread, as a process of a launcher would: it
owns its share of the experts, has a copy of everything else, and takes its share of the sequences. The experts are
bfloat16 under float32 master weights; their gradients go straight into the masters' (`main_grads`). Nothing balances
the load of the experts, so the routing that --capture keeps is as uneven as training made it.

The exit code is 0 when the held-out loss falls from above 5 nats a byte to below 2.3 within 5 minutes, else 1.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mok_modular as mok

NUM_BYTE_VALUES = 256
HIDDEN_SIZE, NUM_HEADS, NUM_LAYERS = 128, 4, 2
NUM_EXPERTS, TOPK, EXPERT_SIZE, SHARED_SIZE = 16, 4, 128, 128
CONTEXT, BATCH = 64, 16
CONV_WIDTH = 4
LEARNING_RATE, WARMUP_STEPS = 4e-3, 20
NUM_CAPTURED_STEPS = 2
INITIAL_LOSS_ABOVE, FINAL_LOSS_BELOW, TIME_LIMIT_S = 5.0, 2.3, 300.0


@dataclass(frozen=True)
class Options:
    """What a run is made of. `capture`: where the routing of the last steps goes."""

    num_steps: int = 500
    seed: int = 0
    num_ranks: int = 2
    mode: str = "fused"
    precision: str = "bf16"
    capture: str | None = None
    is_evaluated: bool = True


@dataclass
class Report:
    """What a run gave; the same on every rank."""

    losses: list[float] = field(default_factory=list)
    initial_loss: float = math.nan
    final_loss: float = math.nan
    num_parameters: int = 0
    routing: mok.Routing | None = None


class MoEBlock(nn.Module):
    """A softmax top-k router before the layer of E routed experts and a shared one."""

    def __init__(self, member: mok.LocalMember, options: Options) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN_SIZE, NUM_EXPERTS, bias=False)
        self.moe = mok.MoE(
            HIDDEN_SIZE,
            EXPERT_SIZE,
            NUM_EXPERTS,
            TOPK,
            group=member,
            config=mok.MoKConfig(mode=options.mode),
            shared_intermediate_size=SHARED_SIZE,
            precision=options.precision,
            num_local_tokens=-(-BATCH // member.size()) * CONTEXT,
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, ids = self.router(tokens).softmax(-1).topk(TOPK)
        weights = weights / weights.sum(-1, keepdim=True)
        return self.moe(tokens.bfloat16(), ids, weights).float().view_as(x)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN_SIZE, 3 * HIDDEN_SIZE, bias=False)
        self.out = nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class TinyMoE(nn.Module):
    """Bytes [B, L] -> logits [B, L, 256]: embedding, causal convolution, layers of attention and MoE."""

    def __init__(self, member: mok.LocalMember, options: Options) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_BYTE_VALUES, HIDDEN_SIZE)
        self.conv = nn.Conv1d(HIDDEN_SIZE, HIDDEN_SIZE, CONV_WIDTH)
        self.attentions = nn.ModuleList(Attention() for _ in range(NUM_LAYERS))
        self.moes = nn.ModuleList(MoEBlock(member, options) for _ in range(NUM_LAYERS))
        self.head = nn.Linear(HIDDEN_SIZE, NUM_BYTE_VALUES)
        nn.init.zeros_(self.head.weight)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text)
        x = x + self.conv(F.pad(x.mT, (CONV_WIDTH - 1, 0))).mT
        for attention, moe in zip(self.attentions, self.moes, strict=True):
            x = x + attention(F.rms_norm(x, (HIDDEN_SIZE,)))
            x = x + moe(F.rms_norm(x, (HIDDEN_SIZE,)))
        return self.head(F.rms_norm(x, (HIDDEN_SIZE,)))


class Masters:
    """float32 copies of the layers' bfloat16 weights: what the optimizer changes, and where gradients are summed."""

    def __init__(self, model: TinyMoE) -> None:
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        self.shared: list[nn.Parameter] = []
        for block in model.moes:
            layer = block.moe
            main_grads = {}
            for name, weight in layer.named_parameters():
                master = nn.Parameter(weight.detach().float())
                master.grad = main_grads[name] = torch.zeros_like(master)
                self.pairs.append((weight, master))
                if name.startswith("w_shared"):
                    self.shared.append(master)
            layer.main_grads = main_grads

    def parameters(self) -> list[nn.Parameter]:
        return [master for _, master in self.pairs]

    @torch.no_grad()
    def write_back(self) -> None:
        """Rounds the masters into the layers."""
        for weight, master in self.pairs:
            weight.copy_(master)


def load_text() -> tuple[Tensor, Tensor]:
    """Returns the bytes to train on and the held-out ones, int64."""
    paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    # Topics repeat one another: each paragraph once, so that what is held out was not trained on.
    text = "\n\n".join(dict.fromkeys(paragraphs)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    num_train = len(data) * 9 // 10
    return data[:num_train], data[num_train:]


def sample_batch(data: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns inputs and next bytes [BATCH, CONTEXT] from random places."""
    start = torch.randint(len(data) - CONTEXT, (BATCH, 1), generator=generator)
    window = data[start + torch.arange(CONTEXT + 1)]
    return window[:, :-1], window[:, 1:]


def loss_of(model: TinyMoE, inputs: Tensor, targets: Tensor) -> Tensor:
    """The summed loss of this rank's share of the sequences, in nats."""
    member = model.moes[0].moe.member
    inputs, targets = (t.tensor_split(member.size())[member.rank()] for t in (inputs, targets))
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")


@torch.no_grad()
def held_out_loss(model: TinyMoE, data: Tensor) -> float:
    """Returns the mean loss in nats a byte over all whole windows of ``data``."""
    num_windows = (len(data) - 1) // CONTEXT
    inputs = data[: num_windows * CONTEXT].view(-1, CONTEXT)
    targets = data[1 : num_windows * CONTEXT + 1].view(-1, CONTEXT)
    batches = zip(inputs.split(BATCH), targets.split(BATCH), strict=True)
    total = sum(loss_of(model, *batch).double() for batch in batches)
    return all_sum(model, total) / (num_windows * CONTEXT)


def all_sum(model: TinyMoE, value: Tensor) -> float:
    """The sum over the ranks."""
    total = value.detach().clone()
    model.moes[0].moe.member.all_reduce([total])
    return total.item()


def train_rank(model: TinyMoE, options: Options, tell: Callable[[str], None]) -> Report:
    """One rank's whole run."""
    member = model.moes[0].moe.member
    generator = torch.Generator().manual_seed(options.seed)
    train_data, held_out_data = load_text()
    masters = Masters(model)
    # Experts have one owner. Everything else has a copy on every rank, which sees its own sequences only.
    copies = [p for name, p in model.named_parameters() if ".moe." not in name]
    optimizer = torch.optim.AdamW([*copies, *masters.parameters()], betas=(0.9, 0.95), weight_decay=0.01)
    report = Report(num_parameters=sum(p.numel() for p in copies) + sum(p.numel() for p in masters.parameters()))
    if options.is_evaluated:
        report.initial_loss = held_out_loss(model, held_out_data)
        tell(f"held-out loss before training: {report.initial_loss:.3f} nats a byte")

    def step(step_idx: int) -> None:
        for group in optimizer.param_groups:
            decay = (1 + math.cos(math.pi * step_idx / options.num_steps)) / 2
            group["lr"] = LEARNING_RATE * decay * min((step_idx + 1) / WARMUP_STEPS, 1.0)
        loss = loss_of(model, *sample_batch(train_data, generator)) / (BATCH * CONTEXT)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        member.all_reduce([p.grad for p in [*copies, *masters.shared]])
        optimizer.step()
        masters.write_back()
        report.losses.append(all_sum(model, loss))
        if step_idx % 50 == 0 or step_idx == options.num_steps - 1:
            tell(f"step {step_idx:4d}  training loss {report.losses[-1]:.3f}")

    first_captured = options.num_steps - NUM_CAPTURED_STEPS
    for step_idx in range(max(0, first_captured)):
        step(step_idx)
    source = (
        f"examples/train_tiny_moe.py, byte-level language model on pydoc_data.topics, seed {options.seed}: "
        f"{NUM_LAYERS} layers of each of the last {NUM_CAPTURED_STEPS} of {options.num_steps} steps"
    )
    with mok.capture_routing(model, options.capture, source=source) as capture:
        for step_idx in range(max(0, first_captured), options.num_steps):
            step(step_idx)
    report.routing = capture.routing
    if options.is_evaluated:
        report.final_loss = held_out_loss(model, held_out_data)
    return report


def train(options: Options, tell: Callable[[str], None] = lambda _: None) -> Report:
    """Trains on `options.num_ranks` CPU ranks; `tell` gets a line now and then."""

    def rank_main(member: mok.LocalMember) -> Report:
        torch.manual_seed(options.seed)  # what every rank has a copy of starts equal
        model = TinyMoE(member, options)
        return train_rank(model, options, tell if member.rank() == 0 else lambda _: None)

    return mok.LocalGroup(options.num_ranks).run(rank_main)[0]


def parse_options() -> tuple[Options, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="training steps (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="CPU ranks (default %(default)s)")
    parser.add_argument("--mode", default="fused", help="fused, split or a plan string (default %(default)s)")
    parser.add_argument("--precision", choices=("bf16", "mxfp8"), default="bf16", help="of the experts' products")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads; ranks take turns (default %(default)s)")
    parser.add_argument("--capture", metavar="FILE", help="write the routing of the last steps to FILE")
    parser.add_argument("--json", action="store_true", help="print one JSON object; progress goes to stderr")
    args = parser.parse_args()
    if args.steps < NUM_CAPTURED_STEPS:
        parser.error(f"--steps must be at least {NUM_CAPTURED_STEPS}")
    if args.ranks < 1 or NUM_EXPERTS % args.ranks:
        parser.error(f"--ranks must divide the number of experts, {NUM_EXPERTS}")
    options = Options(args.steps, args.seed, args.ranks, args.mode, args.precision, args.capture)
    return options, args


def main() -> int:
    options, args = parse_options()
    log = sys.stderr if args.json else sys.stdout
    start = time.perf_counter()
    torch.set_num_threads(args.threads)
    report = train(options, lambda text: print(text, file=log, flush=True))
    elapsed_s = time.perf_counter() - start
    is_learned = report.initial_loss > INITIAL_LOSS_ABOVE and report.final_loss < FINAL_LOSS_BELOW
    ok = is_learned and elapsed_s < TIME_LIMIT_S
    assert report.routing is not None
    imbalance = report.routing.imbalance().tolist()
    result: dict[str, Any] = {
        "ok": ok,
        "initial_loss": report.initial_loss,
        "final_loss": report.final_loss,
        "elapsed_s": elapsed_s,
        "num_steps": options.num_steps,
        "ranks": options.num_ranks,
        "mode": options.mode,
        "precision": options.precision,
        "num_parameters": report.num_parameters,
        "imbalance": imbalance,
        "capture": options.capture,
    }
    if args.json:
        print(json.dumps(result))
    else:
        print(f"held-out loss after training: {report.final_loss:.3f} nats a byte, {elapsed_s:.0f} s in all")
        print("busiest expert over mean, by capture: " + ", ".join(f"{value:.2f}" for value in imbalance))
        print("ok" if ok else f"not ok: wanted below {FINAL_LOSS_BELOW} within {TIME_LIMIT_S:.0f} s")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
