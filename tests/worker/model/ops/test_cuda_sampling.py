"""The kernel that chooses tokens against `pick_tokens`, bit for bit: in the interpreter, or on a
GPU (`make gpu-run`).
"""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from pdcluster_worker.model.sampling.picking import NOT_FINITE, NOTHING_LEFT, PICKED, pick_tokens
from pdcluster_worker.model.sampling.rows import Rows
from pdcluster_worker.model.sampling.sampler import rank_tokens
from tests.worker.model.ops.interpreted import DEVICE, INTERPRETED, ON_GPU, interpret

if not INTERPRETED and not ON_GPU:

    def test_choice_in_the_interpreter() -> None:
        interpret(__file__)

else:
    from pdcluster_worker.model.ops.cuda import BLOCK, DEVICE_ROW_OPS

    # of numpy: what the interpreter adds up is beyond float32, as on a GPU
    pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")

    TEMPERATURES = (0.0, 1e-5, 0.05, 0.7, 1.0, 50.0, 1e30, 3e38, 1e42)
    SHARES = (0.0, 1e-12, 0.3, 0.5, 0.999, 1 - 2.0**-53, 1.0)
    ODD = (-math.inf, -40.0, -2.0, -0.0, 0.0, 0.5, 3.0, 3.0, 1e-40, 3e38, -3e38)

    def settings(*, cut: bool = False) -> Rows:
        """Rows of every temperature and share; some have a min_p, some are cut if `cut` is set."""
        each = [*itertools.product(TEMPERATURES, SHARES)]
        temperatures, u = (np.array(values) for values in zip(*each, strict=True))
        min_p = np.resize((0.0, 0.03, 0.0, 1.0, 0.0), len(each))
        with np.errstate(divide="ignore"):
            inverse = np.where(temperatures > 0, 1 / temperatures, 0.0).astype(np.float32)
        turn = np.arange(len(each)) % 3
        return Rows(
            inverse,
            np.where(cut & (turn == 1), 7, 0),
            np.where(cut & (turn == 2), 0.8, 1.0),
            min_p.astype(np.float32),
            u,
        )

    def some(rows: Rows, every: int) -> Rows:
        """Every so many of them in the interpreter, which computes one after the other; all on a
        GPU.  `every` has no divisor in common with the periods of the settings.
        """
        return rows.take(np.arange(0, len(rows), every)) if INTERPRETED else rows

    def choose(logits: Tensor, rows: Rows) -> list[int]:
        """Status of each row, after a check that tokens are those of the plain operations."""
        found = DEVICE_ROW_OPS.pick(logits.to(DEVICE), rows)
        needed = pick_tokens(logits, rows)
        assert found.status.tolist() == needed.status.tolist()
        good = needed.status == PICKED
        assert found.token_ids[good].tolist() == needed.token_ids[good].tolist()
        return list(found.status)

    def random_logits(num_rows: int, vocab_size: int, *scales: float) -> Tensor:
        generator = torch.Generator().manual_seed(vocab_size)
        scale = torch.from_numpy(np.resize(scales, (num_rows, 1))).float()
        return torch.randn(num_rows, vocab_size, generator=generator) * scale

    @pytest.mark.parametrize("vocab_size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17])
    def test_tokens_are_those_of_the_plain_operations(vocab_size: int) -> None:
        rows = some(settings(), 4)
        logits = random_logits(len(rows), vocab_size, 3.0, 12.0, 0.01, 1.0)
        assert choose(logits, rows) == [PICKED] * len(rows)

    @pytest.mark.parametrize("cut", [True, False])
    def test_ties_are_in_the_order_of_ids(cut: bool) -> None:
        rows = some(settings(cut=cut), 8)
        logits = random_logits(len(rows), BLOCK + 300, 2.0).round()
        choose(logits, rows)
        few = np.arange(0, len(rows), 3)  # a row of equals takes the most passes
        choose(torch.zeros_like(logits)[few], rows.take(few))

    CUTS = tuple(itertools.product((0, 7, 300), (1.0, 0.9, 1e-9), (0.0, 0.03), (0.3, 1.0)))

    def cut_rows(temperature: float) -> Rows:
        """Rows of every combination of top_k, top_p, min_p and share."""
        top_k, top_p, min_p, u = map(np.array, zip(*CUTS, strict=True))
        inverse = np.full(len(CUTS), 1 / temperature, np.float32)
        return Rows(inverse, top_k, top_p, min_p.astype(np.float32), u)

    @pytest.mark.parametrize(("vocab_size", "temperature"), [(301, 0.3), (BLOCK + 9, 2.0)])
    def test_cuts_together_are_those_of_the_plain_operations(
        vocab_size: int, temperature: float
    ) -> None:
        rows = some(cut_rows(temperature), 5)
        choose(random_logits(len(rows), vocab_size, 3.0, 0.2), rows)

    def test_equals_at_both_edges_are_kept_from_the_first() -> None:
        """Few values: the edges of top_k and top_p lie in runs of equals, often in the same."""
        rows = some(cut_rows(1.0), 5)
        logits = random_logits(len(rows), BLOCK + 9, 0.7).round()
        logits[1::2] = logits[1::2].sign() * 0.0  # of both signs
        choose(logits, rows)

    def test_more_equals_than_a_block_at_an_edge() -> None:
        rows = cut_rows(1.0).take(np.arange(1, len(CUTS), 11))
        logits = torch.full((len(rows), 2 * BLOCK), 1.0)
        logits[:, 5], logits[::2, BLOCK + 7] = 2.0, -math.inf
        choose(logits, rows)

    def test_top_k_over_the_tokens_with_a_finite_logit() -> None:
        rows = some(cut_rows(1.0), 5)
        logits = torch.full((len(rows), BLOCK + 9), -math.inf)
        logits[:, 7::1000] = random_logits(len(rows), 5, 1.0)
        choose(logits, rows)

    def test_edges_between_tiny_and_great_logits() -> None:
        """Logits whose distances say nothing of the number of floats between them."""
        rows = cut_rows(1e30).take(np.arange(0, len(CUTS), 7))
        logits = random_logits(len(rows), BLOCK + 900, 1e30, 1e-40, 1e-30)
        logits[:, 3] = 1e-38
        choose(logits, rows)

    @pytest.mark.parametrize("num_tokens", [1, 2, 60])
    def test_odd_logits(num_tokens: int) -> None:
        rows = some(settings(cut=True), 4)
        random = np.random.default_rng(num_tokens)
        logits = torch.full((len(rows), BLOCK + 60), -math.inf)
        for row in logits:
            places = torch.from_numpy(random.integers(0, len(row), num_tokens))
            row[places] = torch.from_numpy(random.choice(ODD, num_tokens)).float()
        choose(logits, rows)

    @pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK] if ON_GPU else [BLOCK])
    def test_a_row_without_a_choice_fails_alone(at: int) -> None:
        rows = some(settings(cut=True), 4)
        logits = random_logits(len(rows), BLOCK + 100, 3.0)
        bad = {3: math.nan, 5: -math.nan, 9: math.inf}
        for row, value in bad.items():
            logits[row, at] = value
        logits[10], logits[11, at] = -math.inf, -math.inf

        status = choose(logits, rows)

        assert [row for row, found in enumerate(status) if found == NOT_FINITE] == [*bad]
        assert status.index(NOTHING_LEFT) == 10
        assert status.count(PICKED) == len(rows) - 4

    def test_ranks_are_those_of_the_plain_operations() -> None:
        logits = random_logits(9, BLOCK + 5, 4.0).round()
        places = np.array([8, 0, 4])
        found = DEVICE_ROW_OPS.rank(logits.to(DEVICE), places, 20)
        needed = rank_tokens(logits, places, 20)
        for name in ("ids", "best", "total"):
            assert getattr(found, name).tolist() == getattr(needed, name).tolist()

    def test_logits_stay_where_they_are() -> None:
        logits = torch.zeros(2, 3, device=DEVICE)
        assert DEVICE_ROW_OPS.receive(logits) is logits
