"""One-line faults, and the test that must catch each: `(file, what stands there, what takes its place, tests)`."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    file: str
    old: str
    new: str
    tests: str


CPU = "tests/cpu/"

MUTATIONS = [
    # ---- Python ----
    Mutation(
        "mok_modular/protocol/plan.py",
        "for group in (*self.groups, *((stage,) for stage in ending))",
        "for group in (*reversed(self.groups), *((stage,) for stage in ending))",
        CPU + "test_plan.py",
    ),
    Mutation(
        "mok_modular/ranks/rounds.py",
        "(causes or others or raised)[0]",
        "(raised or causes or others)[0]",
        CPU + "test_group.py",
    ),
    Mutation(
        "mok_modular/swap/window.py",
        'num_generations - 1 - generation if self.call.kind == "forward" else generation',
        "generation",
        CPU + "test_swap.py -k reference_in_place",
    ),
    Mutation("mok_modular/swap/window.py", "- self.first_row\n", "\n", CPU + "test_swap.py -k reference_in_place"),
    Mutation(
        "mok_modular/swap/__init__.py",
        "self.errors[rank] = error\n",
        "pass\n",
        CPU + "test_swap.py -k an_exception",
    ),
    Mutation(
        "mok_modular/swap/backward.py",
        "int(end[expert]) > window.num_rows",
        "int(end[expert]) >= window.num_rows",
        CPU + "test_swap_backward.py -k reference_in_place",
    ),
    Mutation(
        "mok_modular/swap/backward.py",
        "out.float() + sums if _is_added(tensors) else sums",
        "sums",
        CPU + "test_swap_backward.py -k main_grads",
    ),
    Mutation(
        "mok_modular/swap/backward.py",
        'tensors.get(f"w_dgrad_{name}", tensors[f"w_routed_{name}"])',
        'tensors[f"w_routed_{name}"]',
        CPU + "test_swap_backward.py -k own_axis",
    ),
    Mutation(
        "mok_modular/swap/backward.py",
        "d_router.where(mask, 0)",
        "d_router",
        CPU + "test_swap_backward.py -k reference_in_place",
    ),
    Mutation(
        "mok_modular/testing/contract_backward.py",
        "_group_sums(d_h * h),",
        "_group_sums(d_h * h * w),",
        CPU + "test_contract_backward.py -k our_own",
    ),
    Mutation(
        "mok_modular/protocol/trace.py",
        '"dur": (each.end - each.begin) * scale',
        '"dur": each.end * scale',
        CPU + "test_trace.py -k chrome",
    ),
    Mutation(
        "mok_modular/protocol/trace.py", "if b.begin < a.end", "if b.begin > a.end", CPU + "test_trace.py -k fibers"
    ),
    Mutation(
        "mok_modular/testing/faults.py",
        "            planted_faults.remove(row)",
        "            pass",
        CPU + "test_faults.py -k left_behind",
    ),
    Mutation(
        "mok_modular/testing/contract.py",
        "_HALF_ULP = 0.5 + 2.0**-5",
        "_HALF_ULP = 2.5",
        CPU + "test_swap.py -k broken_rule",
    ),
    Mutation(
        "mok_modular/stages/swiglu.py",
        "torch.where(up < -limit, -limit, up)",
        "torch.where(up < -limit, limit, up)",
        CPU + "test_stage_swiglu.py",
    ),
    Mutation(
        "mok_modular/stages/swiglu.py",
        "gate.where(is_used, 0), up.where(is_used, 0)",
        "gate, up",
        CPU + "test_swap.py -k behind_the_last",
    ),
    Mutation(
        "mok_modular/calls/workspace.py",
        "found is not None and found.num_local_tokens >= num_local_tokens else",
        "found is not None and found.num_local_tokens < num_local_tokens else",
        CPU + "test_workspace.py",
    ),
    Mutation(
        "mok_modular/protocol/diagnosis.py",
        'at = wait["peer"] if wait["peer"] >= 0 else wait["rank"]',
        'at = wait["rank"]',
        CPU + "test_faults.py -k stalled",
    ),
    Mutation(
        "mok_modular/protocol/config.py",
        "if self.macrobatch_size % self.minibatch_size != 0:",
        "if self.macrobatch_size % self.minibatch_size == -1:",
        CPU + "test_config.py",
    ),
    Mutation(
        "mok_modular/cli/explore.py",
        "for num_ranks, layouts in LAYOUTS.items():",
        "for num_ranks, layouts in ():",
        CPU + "test_explore.py -k command",
    ),
    # ---- protocol ----
    Mutation(
        "csrc/protocol/ring.h",
        "slot_num_blocks(call, macrobatch + 1, slot) > 0",
        "slot >= 0",
        CPU + "test_stage_ring.py",
    ),
    Mutation(
        "csrc/protocol/arrivals.h",
        "if (is_inside(kStage, kOuter, call)) return num_block_tasks(kOuter, call.shape);",
        "if (is_inside(kStage, kOuter, call)) return 1;",
        CPU + "test_bits.py",
    ),
    Mutation(
        "csrc/protocol/leave.h",
        "    epochs->call += 1;",
        "    epochs->call += 0;",
        CPU + "test_sequences.py",
    ),
    Mutation(
        "csrc/protocol/tasks.h",
        "num_steps = num_windows + lag(Stage::combine) + 2;",
        "num_steps = num_windows + lag(Stage::combine);",
        CPU + "test_bits.py",
    ),
    Mutation(
        "csrc/protocol/signals.h",
        "    return have >> kEnteredBits == own_entered >> kEnteredBits && have != own_entered;",
        "    return have != own_entered && false;",
        CPU + "test_mismatch.py",
    ),
    Mutation(
        "csrc/protocol/roster.h",
        "(dispatch), (dispatch), (dispatch, gate_up))",
        "(dispatch), (dispatch), (dispatch, down))",
        CPU + "test_explore.py -k planted_fault",
    ),
    # ---- stages ----
    Mutation(
        "csrc/stages/dispatch.h",
        "return first / rows < row / rows ? first : -1;",
        "return first < row ? first : -1;",
        CPU + "test_bits.py -k pull_once",
    ),
    Mutation(
        "csrc/stages/schedule.h",
        "(ids[other] == expert && other >= idx)",
        "ids[other] == expert",
        CPU + "test_stage_schedule.py -k pulled_once",
    ),
    Mutation(
        "csrc/stages/dispatch.h",
        "wait_slot_free(args.call, task.block, signals) && wait_row_sources",
        "wait_row_sources",
        CPU + "test_protocol_errors.py -k slot_free",
    ),
    Mutation(
        "csrc/stages/publish.h",
        "return signals.wait_all_ranks(Edge::done, /*epochs_back=*/1);",
        "return true;",
        CPU + "test_explore.py -k same_edges",
    ),
    Mutation(
        "csrc/stages/reverse_combine.h",
        "return wait_slot_free(args.call, task.block, signals) &&",
        "return",
        CPU + "test_explore.py -k same_edges",
    ),
    Mutation(
        "csrc/stages/stage.h",
        "block_slot(call.shape, block)), count);",
        "0 * block_slot(call.shape, block)), count);",
        CPU + "test_bits.py",
    ),
    Mutation(
        "csrc/stages/swiglu.h",
        "return to_bf16(silu * up);",
        "return to_bf16(to_float(to_bf16(silu)) * up);",
        CPU + "test_swap.py -k our_own",
    ),
    Mutation(
        "csrc/numeric.h",
        "value > limit ? limit : value < -limit ? -limit : value",
        "value > limit ? limit : value",
        CPU + "test_swap.py -k our_own",
    ),
    Mutation(
        "csrc/stages/reduce.h",
        "is_route[k] = begin + k < topk && call.schedule.route_rank[route] >= 0;",
        "is_route[k] = begin + k < topk;",
        CPU + "test_swap.py -k our_own",
    ),
    Mutation(
        "csrc/stages/schedule.h",
        "(src < src_rank && total > order ? 1 : 0)",
        "(src <= src_rank && total > order ? 1 : 0)",
        CPU + "test_stage_schedule.py",
    ),
    Mutation(
        "csrc/stages/grouped_gemm.h",
        "task.part * kTileCols + part.first_col,\n                    !kIsShared && rows);",
        "task.part * kTileCols + part.first_col,\n                    !kIsShared && !rows);",
        CPU + "test_swap.py -k our_own",
    ),
    Mutation(
        "csrc/stages/wgrad.h",
        "signals.add(Edge::carry_done, carry_index(call, carry_unit(call, task), macrobatch));",
        "signals.add(Edge::carry_done, carry_index(call, 0, macrobatch));",
        CPU + "test_faults.py -k backward",
    ),
    Mutation(
        "csrc/stages/swiglu_backward.h",
        "out.router = d_hidden * hidden;",
        "out.router = weighted * hidden;",
        CPU + "test_contract_backward.py -k our_own",
    ),
    # ---- the host target ----
    Mutation(
        "csrc/targets/host/driver.h",
        "return S::needs_of_other_kernels(args, task, signals);",
        "return S::needs(args, task, signals);",
        CPU + "test_swap_backward.py -k one_carry",
    ),
    Mutation(
        "csrc/protocol/signals.h",
        "words[word_offset(Edge::done, parity, src, s)] = epochs.call;",
        "words[word_offset(Edge::done, parity, src, s)] = 0;",
        CPU + "test_protocol_errors.py -k reset",
    ),
    Mutation(
        "csrc/targets/host/runtime.cpp",
        "if (have == wait.want ||",
        "if (have != wait.want ||",
        CPU + "test_faults.py -k duplicated",
    ),
    Mutation(
        "csrc/targets/host/faults.cpp",
        "hits_[i].fetch_add(1) == 0",
        "hits_[i].fetch_add(1) >= 0",
        CPU + "test_faults.py -k corrupted",
    ),
    Mutation(
        "csrc/stages/combine.h",
        "    free_slot(args.call, task.block, signals);",
        "",
        CPU + "test_explore.py -k planted_fault",
    ),
    Mutation(
        "csrc/protocol/tasks.h",
        "return arrival % 2 == 0 && arrival / 2 < num_comm_ctas;",
        "return arrival % 2 == 0 && arrival / 2 < num_comm_ctas && arrival > 0;",
        CPU + "test_explore.py -k planted_fault",
    ),
    Mutation(
        "csrc/explore/task_actions.cpp",
        "write(x_row(call_, block_, 0), version(block_));",
        "",
        CPU + "test_explore.py -k planted_fault",
    ),
    Mutation(
        "csrc/explore/search.cpp",
        "        if (is_tainted || cell(s, object) == a.value) return true;",
        "        return true;",
        CPU + "test_explore.py -k planted_fault",
    ),
]
