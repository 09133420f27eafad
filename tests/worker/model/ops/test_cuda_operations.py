"""The cuda operations against `Reference`: in Triton's interpreter, in a process of its own, or on
a GPU (`make gpu-run`).
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pdcluster_worker.config.engine import KvCacheDtype
from tests.worker.model.ops import paged_steps as cases
from tests.worker.model.ops.interpreted import DEVICE, INTERPRETED, ON_GPU, interpret

TOLERANCE = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}
if INTERPRETED:  # it cuts bfloat16 off where a GPU rounds
    TOLERANCE[torch.bfloat16] = {"rtol": 6e-2, "atol": 6e-2}

if not INTERPRETED and not ON_GPU:

    @pytest.mark.timeout(900)  # 426 s were seen on two busy cores
    def test_kernels_in_the_interpreter() -> None:
        interpret(__file__)

else:
    from pdcluster_worker.model.ops import paged_attention
    from pdcluster_worker.model.ops.cuda import CudaOperations
    from pdcluster_worker.model.ops.graphs import PlanCopy, pad_decodes
    from pdcluster_worker.model.ops.operations import (
        AttentionShape,
        Forward,
        HeadNorms,
        Norm,
        Rotation,
    )
    from pdcluster_worker.model.ops.paged_attention import AttentionSizes, TorchAttention
    from pdcluster_worker.model.ops.reference import Reference
    from pdcluster_worker.model.ops.stored_kv import StoredKV
    from pdcluster_worker.model.step_plan import StepLimits, StepPlan

    if INTERPRETED:
        from tests.worker.model.ops.interpreter import widen_dots

        widen_dots()

    PLAIN = Reference(torch.zeros(1), AttentionShape(1, 1, 1, 1.0))

    def limits_of(block_size: int) -> StepLimits:
        return StepLimits(max_tokens=128, max_sequences=16, longest=512, block_size=block_size)

    def operations_of(case: cases.Case, step: cases.Step) -> CudaOperations:
        return CudaOperations(there(step.cache), case.shape, limits_of(case.block_size))

    def there(cache: Tensor | StoredKV) -> Tensor | StoredKV:
        """A copy in one memory, as a worker has it."""
        if isinstance(cache, Tensor):
            return cache.to(DEVICE, copy=True)
        rows, scales = cache.rows, cache.scales
        storage = torch.empty(0, dtype=torch.uint8).set_(rows.untyped_storage())
        memory = storage.to(DEVICE, copy=True)
        places = (rows.shape, rows.stride(), rows.storage_offset())
        own = memory.view(rows.dtype).as_strided(*places)
        if scales is None:
            return replace(cache, rows=own)
        of_scales = (scales.shape, scales.stride(), scales.storage_offset())
        return StoredKV(own, memory.view(torch.float32).as_strided(*of_scales), cache.dtype)

    def simple(dtype: torch.dtype = torch.float32) -> CudaOperations:
        return CudaOperations(
            torch.zeros(2, 1, 1, 2, 4, 16, dtype=dtype, device=DEVICE),
            AttentionShape(1, 1, 16, 1.0),
            limits_of(4),
        )

    def placed(plan: StepPlan, case: cases.Case) -> StepPlan:
        return PlanCopy(DEVICE, limits_of(case.block_size)).place(plan)

    def norms_there(norms: HeadNorms | None) -> HeadNorms | None:
        if norms is None:
            return None
        return HeadNorms(
            *(
                Norm(norm.weight.to(DEVICE), norm.epsilon, norm.rounds_first)
                for norm in (norms.query, norms.key)
            )
        )

    def close(found: Tensor, needed: Tensor) -> None:
        torch.testing.assert_close(found.cpu(), needed, equal_nan=True, **TOLERANCE[needed.dtype])

    def same(found: Tensor, needed: Tensor) -> None:
        """Bit for bit where bfloat16 is rounded."""
        if ON_GPU or needed.dtype == torch.float32:
            assert torch.equal(found.cpu(), needed)
        else:
            close(found, needed)

    def run(
        operations: CudaOperations, step: cases.Step, case: cases.Case
    ) -> tuple[Tensor, Tensor]:
        """Queries, keys and values after `rope_store`, and what `attend` returns."""
        qkv = step.qkv.to(DEVICE, copy=True)
        plan = placed(step.plan, case)
        rotation = Rotation(step.rotation.cosine.to(DEVICE), step.rotation.sine.to(DEVICE))
        operations.rope_store(qkv, plan, cases.LAYER, rotation, norms_there(step.norms))
        return qkv, operations.attend(qkv, plan, cases.LAYER, case.window)

    @pytest.mark.parametrize("case", cases.BOTH if ON_GPU else cases.FEW, ids=cases.label)
    def test_step_is_that_of_the_reference(case: cases.Case) -> None:
        step = cases.make_step(case)
        operations = operations_of(case, step)
        cache, needed = step.cache.clone(), step.qkv.clone()
        reference = Reference(cache, case.shape)
        reference.rope_store(needed, step.plan, cases.LAYER, step.rotation, step.norms)

        qkv, out = run(operations, step, case)

        rows = step.plan.num_tokens
        close(qkv[:rows], needed[:rows])
        close(operations._cache.rows, cache)
        close(out, reference.attend(needed, step.plan, cases.LAYER, case.window))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_nothing_is_rotated_or_normed_unless_requested(dtype: torch.dtype) -> None:
        case = cases.Case("plain", ((3, 1), (6, 5)), dtype=dtype)
        step = cases.make_step(case)
        operations = operations_of(case, step)
        qkv = step.qkv.to(DEVICE, copy=True)

        operations.rope_store(qkv, placed(step.plan, case), cases.LAYER, None, None)

        Reference(step.cache, case.shape).rope_store(step.qkv, step.plan, cases.LAYER, None, None)
        assert torch.equal(qkv.cpu(), step.qkv)
        close(operations._cache.rows, step.cache)

    @pytest.mark.parametrize("kind", cases.STORED)
    @pytest.mark.parametrize("case", cases.STORED_CASES, ids=cases.label)
    def test_step_over_stored_keys_is_that_of_the_reference(
        case: cases.Case, kind: KvCacheDtype
    ) -> None:
        step = cases.stored_as(cases.make_step(case), kind)
        operations, needed = operations_of(case, step), step.qkv.clone()
        reference = Reference(step.cache, case.shape)
        reference.rope_store(needed, step.plan, cases.LAYER, step.rotation, step.norms)

        _, out = run(operations, step, case)

        tolerance = {"rtol": 6e-2, "atol": 6e-2} if kind == "fp8_e4m3" else {}
        expected = reference.attend(needed, step.plan, cases.LAYER, case.window)
        torch.testing.assert_close(
            out.cpu(), expected, **(tolerance or {"rtol": 2e-2, "atol": 2e-2})
        )

    @pytest.mark.parametrize("kind", cases.STORED)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_stored_rows_have_the_bytes_of_the_reference(
        kind: KvCacheDtype, dtype: torch.dtype
    ) -> None:
        """Also of rows that are 0, tiny, huge or not finite."""
        case = cases.Case("stored", ((3, 1), (9, 9)), head_dim=24, dtype=dtype)
        step = cases.stored_as(cases.make_step(case), kind)
        for row, value in enumerate((0.0, 1e-37, float("nan"), float("inf"), 3.3e38)):
            step.qkv[row, case.num_heads * case.head_dim :] = value
        operations = operations_of(case, step)

        operations.rope_store(
            step.qkv.to(DEVICE, copy=True), placed(step.plan, case), cases.LAYER, None, None
        )

        theirs, mine = StoredKV.of(step.cache), operations._cache
        Reference(theirs, case.shape).rope_store(step.qkv, step.plan, cases.LAYER, None, None)
        if theirs.scales is None:
            close(mine.rows, theirs.rows)
            return
        assert mine.scales is not None
        assert torch.equal(mine.rows.cpu().view(torch.int8), theirs.rows.view(torch.int8))
        exact = {"rtol": 0, "atol": 0, "equal_nan": True}
        torch.testing.assert_close(mine.scales.cpu(), theirs.scales, **exact)

    @pytest.mark.parametrize("kind", ["int8", "fp8_e4m3"])
    def test_a_scale_that_is_not_a_number_reaches_the_rows_that_see_it_alone(
        kind: KvCacheDtype,
    ) -> None:
        case = cases.Case("poisoned", ((60, 20),), num_heads=2, num_kv_heads=1)
        step, bad = cases.stored_as(cases.make_step(case), kind), 7
        operations = operations_of(case, step)
        _, clean = run(operations, step, case)
        step.qkv[bad, -case.head_dim :] = float("inf")  # the scale becomes NaN

        _, found = run(operations, step, case)

        assert torch.equal(found[:bad], clean[:bad])
        assert not found[bad:20, -case.head_dim :].isfinite().any()

    @pytest.mark.parametrize("window", [None, 6])
    def test_what_is_not_finite_reaches_no_row_that_does_not_see_it(window: int | None) -> None:
        """A later row of the same tile has a bad value: the rows before it, and those whose window
        has left it, are as without it.
        """
        case = cases.Case("poisoned", ((60, 20),), num_heads=2, num_kv_heads=1, window=window)
        step, bad = cases.make_step(case), 7
        operations = operations_of(case, step)
        _, clean = run(operations, step, case)
        step.qkv[bad, -case.head_dim :] = float("inf")

        _, found = run(operations, step, case)

        seen = range(bad, 20 if window is None else bad + window)
        unseen = [row for row in range(20) if row not in seen]
        assert torch.equal(found[unseen], clean[unseen])
        assert not found[list(seen), -case.head_dim :].isfinite().any()

    def test_row_does_not_depend_on_the_other_sequences() -> None:
        together = cases.Case("together", ((300, 1), (9, 1), (20, 9)), dtype=torch.bfloat16)
        step = cases.make_step(together)
        operations = operations_of(together, step)
        _, all_rows = run(operations, step, together)

        _, row = run(operations, cases.part_of(step, 0, 0, 1), together)

        assert torch.equal(row[0], all_rows[0])

    def test_splits_of_long_contexts_are_larger(monkeypatch: pytest.MonkeyPatch) -> None:
        """With one split for each, contexts above 256 take the doubled size."""
        monkeypatch.setattr(paged_attention, "MAX_SPLITS", 1)
        case = cases.Case("one split", ((9, 1), (256, 1), (257, 1), (500, 1)))
        step = cases.make_step(case)
        reference = Reference(step.cache.clone(), case.shape)
        needed = step.qkv.clone()
        reference.rope_store(needed, step.plan, cases.LAYER, step.rotation, step.norms)

        _, found = run(operations_of(case, step), step, case)

        close(found, reference.attend(needed, step.plan, cases.LAYER))

    @pytest.mark.parametrize("sequences", [((5, 5), (9, 9)), ((12, 1), (20, 7), (2, 2))])
    def test_long_prompts_by_torch(
        monkeypatch: pytest.MonkeyPatch, sequences: tuple[tuple[int, int], ...]
    ) -> None:
        """Alone, and beside a decode, a chunk after a context and a short prompt."""
        monkeypatch.setattr(paged_attention, "MIN_ROWS", 3)
        sequences += ((11, 11),)
        case = cases.Case("long", sequences, padding=4, dtype=torch.bfloat16)
        step = cases.make_step(case)
        operations = operations_of(case, step)
        sizes = AttentionSizes.of(case.shape, case.dtype, 512)
        operations._attention = TorchAttention(operations._cache, case.shape, sizes)
        operations._attention.begin(step.plan)
        reference = Reference(step.cache.clone(), case.shape)
        rotated = step.qkv.clone()
        reference.rope_store(rotated, step.plan, cases.LAYER, step.rotation, None)

        _, found = run(operations, step, case)

        close(found, reference.attend(rotated, step.plan, cases.LAYER))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_padded_decodes_are_those_without_padding(dtype: torch.dtype) -> None:
        """As a graph runs them: a sequence for each row of padding, launched as the longest context
        is.
        """
        case = cases.Case("padded", ((9, 1), (30, 1), (2, 1)), padding=5, dtype=dtype)
        step = cases.make_step(case)
        operations = operations_of(case, step)
        _, needed = run(operations, step, case)

        _, found = run(operations, replace(step, plan=pad_decodes(step.plan)), case)

        assert torch.equal(found, needed)
        assert not found[3:].any()

    @pytest.mark.parametrize("rounds_first", [True, False])
    @pytest.mark.parametrize("adds", [True, False])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_add_rms_norm(dtype: torch.dtype, adds: bool, rounds_first: bool) -> None:
        random = torch.Generator().manual_seed(1)
        x, hidden = (torch.randn(3, 40, generator=random).to(dtype) for _ in range(2))
        norm = Norm(torch.rand(40, generator=random), 1e-5, rounds_first)
        there = hidden.to(DEVICE, copy=True)

        found = simple(dtype).add_rms_norm(
            x.to(DEVICE) if adds else None, there, Norm(norm.weight.to(DEVICE), 1e-5, rounds_first)
        )

        close(
            found,
            PLAIN.add_rms_norm(x if adds else None, hidden, norm),
        )
        same(there, hidden)

    # of numpy: the interpreter's exp(300)
    @pytest.mark.filterwarnings("ignore:overflow encountered in exp")
    @pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_gate_mul(dtype: torch.dtype, activation: str) -> None:
        gate_up = torch.randn(3, 2 * 1030, generator=torch.Generator().manual_seed(2)).to(dtype) * 8
        gate_up[0, 0], gate_up[0, 1], gate_up[1, 0] = 300.0, -300.0, float("nan")

        found = simple(dtype).gate_mul(gate_up.to(DEVICE), activation)

        close(found, PLAIN.gate_mul(gate_up, activation))

    @pytest.mark.parametrize("wide", [True, False])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_linear(dtype: torch.dtype, wide: bool) -> None:
        random = torch.Generator().manual_seed(3)
        x, weight, bias = (
            torch.randn(*size, generator=random).to(dtype) for size in ((3, 32), (48, 32), (48,))
        )
        for given in (bias, None):
            needed = PLAIN.linear(x, PLAIN.pack(weight, given, wide=wide))
            operations = simple(dtype)

            found = operations.linear(x.to(DEVICE), operations.pack(weight, given, wide=wide))

            assert found.dtype == (torch.float32 if wide else dtype)
            close(found, needed)

    def test_cache_must_be_contiguous() -> None:
        with pytest.raises(ValueError, match="contiguous"):
            CudaOperations(
                torch.zeros(2, 1, 1, 2, 16, 4).transpose(4, 5),
                AttentionShape(1, 1, 16, 1.0),
                limits_of(4),
            )

    def test_norms_that_round_apart_are_refused() -> None:
        norms = HeadNorms(
            Norm(torch.ones(16), 1e-5), Norm(torch.ones(16), 1e-5, rounds_first=False)
        )
        with pytest.raises(ValueError, match="round alike"):
            simple().rope_store(
                torch.zeros(1, 48), cases.make_step(cases.CASES[0]).plan, 0, None, norms
            )

    @pytest.mark.skipif(not ON_GPU, reason="a graph is captured on a GPU alone")
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_graphs_give_what_the_step_gives(dtype: torch.dtype) -> None:
        """Captured once, then run for other contexts, tables and numbers of decodes; a chunk runs
        beside them.
        """
        case = cases.Case(
            "largest", ((300, 1), (9, 1), (40, 1), (7, 1), (200, 1)), padding=3, dtype=dtype
        )
        step = cases.make_step(case)
        step.cache.normal_()  # contexts of other plans than the case's
        operations, eager = (operations_of(case, step) for _ in range(2))
        inputs = torch.randn(512, step.qkv.shape[1], generator=torch.Generator().manual_seed(5)).to(
            DEVICE, dtype
        )

        def forward_of(run_by: CudaOperations) -> Forward:
            def forward(plan: StepPlan) -> Tensor:
                qkv = inputs[plan.positions % 512]
                run_by.rope_store(qkv, plan, cases.LAYER, None, None)
                return run_by.attend(qkv, plan, cases.LAYER)[plan.sample_at].float()

            return forward

        replayed = operations.prepare(forward_of(operations))
        for other in (
            case,
            replace(case, sequences=case.sequences[1:3], padding=0),
            replace(case, sequences=((20, 1), (50, 9)), padding=0),
        ):
            plan = cases.make_plan(other, torch.Generator().manual_seed(7))
            with torch.inference_mode():
                found, needed = replayed(plan).clone(), forward_of(eager)(placed(plan, other))
            torch.testing.assert_close(found, needed, rtol=0, atol=0)
