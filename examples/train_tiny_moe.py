"""Trains a small byte-level mixture-of-experts language model on a CPU, and can keep what its routers chose.

The text is the Python language reference that every CPython carries (about 370 KB of English), so nothing
is downloaded; its last tenth is held out. The MoE blocks are mok_modular.reference.moe: bfloat16 experts,
rounded where the library rounds, under float32 master weights. Nothing balances the load of the experts, so
the routing that --capture keeps is as uneven as training made it. The capture that ships with the package
was made with --seed 1.

The exit code is 0 when the held-out loss falls from above 5 nats a byte to below 2.3 within 5 minutes (500
steps on two cores take about one minute), else 1.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pydoc_data.topics import topics
from typing import TextIO

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mok_modular import reference
from mok_modular.routing import Routing, save_routing

NUM_BYTE_VALUES = 256
HIDDEN_SIZE, NUM_HEADS, NUM_LAYERS = 128, 4, 2
NUM_EXPERTS, TOPK, EXPERT_SIZE, SHARED_SIZE = 16, 4, 64, 128
CONTEXT, BATCH = 64, 16
CONV_WIDTH = 4
LEARNING_RATE, WARMUP_STEPS = 4e-3, 20
NUM_RANKS, NUM_CAPTURED_STEPS = 4, 2  # a captured step's tokens are those of 4 ranks, sequences side by side
INITIAL_LOSS_ABOVE, FINAL_LOSS_BELOW, TIME_LIMIT_S = 5.0, 2.3, 300.0


class MoEBlock(nn.Module):
    """A softmax top-k router, E routed experts and a shared one. Keeps what its router chose last."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN_SIZE, NUM_EXPERTS, bias=False)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape) / math.sqrt(shape[-1]))

        self.routed_gate = weight(NUM_EXPERTS, EXPERT_SIZE, HIDDEN_SIZE)
        self.routed_up = weight(NUM_EXPERTS, EXPERT_SIZE, HIDDEN_SIZE)
        self.routed_down = weight(NUM_EXPERTS, HIDDEN_SIZE, EXPERT_SIZE)
        self.shared_gate = weight(SHARED_SIZE, HIDDEN_SIZE)
        self.shared_up = weight(SHARED_SIZE, HIDDEN_SIZE)
        self.shared_down = weight(HIDDEN_SIZE, SHARED_SIZE)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        probabilities = self.router(tokens).softmax(-1)
        weights, ids = probabilities.topk(TOPK)
        weights = weights / weights.sum(-1, keepdim=True)
        self.expert_ids, self.router_weights = ids, weights.detach()
        out = reference.moe(
            tokens.bfloat16(),
            ids,
            weights,
            self.routed_gate.bfloat16(),
            self.routed_up.bfloat16(),
            self.routed_down.bfloat16(),
            self.shared_gate.bfloat16(),
            self.shared_up.bfloat16(),
            self.shared_down.bfloat16(),
        )
        return out.float().view_as(x)


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

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_BYTE_VALUES, HIDDEN_SIZE)
        self.conv = nn.Conv1d(HIDDEN_SIZE, HIDDEN_SIZE, CONV_WIDTH)
        self.attentions = nn.ModuleList(Attention() for _ in range(NUM_LAYERS))
        self.moes = nn.ModuleList(MoEBlock() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(HIDDEN_SIZE, NUM_BYTE_VALUES)
        nn.init.zeros_(self.head.weight)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text)
        x = x + self.conv(F.pad(x.mT, (CONV_WIDTH - 1, 0))).mT
        for attention, moe in zip(self.attentions, self.moes, strict=True):
            x = x + attention(F.rms_norm(x, (HIDDEN_SIZE,)))
            x = x + moe(F.rms_norm(x, (HIDDEN_SIZE,)))
        return self.head(F.rms_norm(x, (HIDDEN_SIZE,)))


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
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def held_out_loss(model: TinyMoE, data: Tensor) -> float:
    """Returns the mean loss in nats a byte over all whole windows of ``data``."""
    num_windows = (len(data) - 1) // CONTEXT
    inputs = data[: num_windows * CONTEXT].view(-1, CONTEXT)
    targets = data[1 : num_windows * CONTEXT + 1].view(-1, CONTEXT)
    batches = zip(inputs.split(BATCH), targets.split(BATCH), strict=True)
    return sum(loss_of(model, i, t).item() * len(i) for i, t in batches) / num_windows


def captured_choices(model: TinyMoE) -> list[tuple[Tensor, Tensor]]:
    """Returns each layer's latest ids and weights [R, T, K]; a rank holds its share of the sequences."""
    shape = (NUM_RANKS, BATCH * CONTEXT // NUM_RANKS, TOPK)
    blocks = [module for module in model.modules() if isinstance(module, MoEBlock)]
    return [(block.expert_ids.view(shape).int(), block.router_weights.view(shape)) for block in blocks]


def train(model: TinyMoE, data: Tensor, num_steps: int, seed: int, log: TextIO) -> Routing:
    """Trains in place and returns the routing of the last steps: all layers of one, then all of the next."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    generator = torch.Generator().manual_seed(seed)
    choices = []
    for step in range(num_steps):
        for group in optimizer.param_groups:
            decay = (1 + math.cos(math.pi * step / num_steps)) / 2
            group["lr"] = LEARNING_RATE * decay * min((step + 1) / WARMUP_STEPS, 1.0)
        loss = loss_of(model, *sample_batch(data, generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == num_steps - 1:
            print(f"step {step:4d}  training loss {loss.item():.3f}", file=log, flush=True)
        if step >= num_steps - NUM_CAPTURED_STEPS:
            choices += captured_choices(model)
    ids, weights = zip(*choices, strict=True)
    source = (
        f"examples/train_tiny_moe.py, byte-level language model on pydoc_data.topics, seed {seed}: "
        f"{NUM_LAYERS} layers of each of the last {NUM_CAPTURED_STEPS} of {num_steps} steps"
    )
    return Routing(torch.stack(ids), torch.stack(weights), NUM_EXPERTS, source)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="training steps (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of torch (default %(default)s)")
    parser.add_argument("--capture", metavar="FILE", help="write the routing of the last steps to FILE")
    parser.add_argument("--json", action="store_true", help="print one JSON object; progress goes to stderr")
    args = parser.parse_args()
    if args.steps < NUM_CAPTURED_STEPS:
        parser.error(f"--steps must be at least {NUM_CAPTURED_STEPS}")
    log = sys.stderr if args.json else sys.stdout

    start = time.perf_counter()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    train_data, held_out_data = load_text()
    model = TinyMoE()
    initial_loss = held_out_loss(model, held_out_data)
    print(f"held-out loss before training: {initial_loss:.3f} nats a byte", file=log, flush=True)
    routing = train(model, train_data, args.steps, args.seed, log)
    final_loss = held_out_loss(model, held_out_data)
    if args.capture:
        save_routing(args.capture, routing)
    elapsed_s = time.perf_counter() - start
    is_learned = initial_loss > INITIAL_LOSS_ABOVE and final_loss < FINAL_LOSS_BELOW
    ok = is_learned and elapsed_s < TIME_LIMIT_S
    imbalance = routing.imbalance().tolist()
    result = {
        "ok": ok,
        "initial_loss": initial_loss,
        "final_loss": final_loss,
        "elapsed_s": elapsed_s,
        "num_steps": args.steps,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "imbalance": imbalance,
        "capture": args.capture,
    }
    if args.json:
        print(json.dumps(result))
    else:
        print(f"held-out loss after training: {final_loss:.3f} nats a byte, {elapsed_s:.0f} s in all")
        print("busiest expert over mean, by capture: " + ", ".join(f"{value:.2f}" for value in imbalance))
        print("ok" if ok else f"not ok: wanted below {FINAL_LOSS_BELOW} within {TIME_LIMIT_S:.0f} s")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
