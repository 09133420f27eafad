"""The scraper's bench: it scrapes real listeners, says the share of a core, and fails over its
limit or on a miss.
"""

import pytest
import scrape

from pdcluster_operator.scrape.page import parse_page


def figures(cpu_seconds: float = 0.1, num_misses: int = 0) -> scrape.Figures:
    return scrape.Figures(200, 5.0, 28000, [cpu_seconds, cpu_seconds], [0.3, 0.4], num_misses)


def test_bench_scrapes_every_worker_in_every_round():
    found = scrape.run(workers=3, interval_seconds=0.05, rounds=2)

    assert (found.workers, found.num_misses, len(found.cpu_seconds), len(found.round_seconds)) == (
        3,
        0,
        2,
        2,
    )
    assert found.page_bytes > 20_000
    assert found.core_ratio > 0


def test_bench_pages_are_a_worker_s_and_grow():
    first, second = (parse_page(page) for page in scrape.pages(2))

    assert second.prompt_tokens_total > first.prompt_tokens_total
    assert second.time_to_first_token_seconds_count > first.time_to_first_token_seconds_count


@pytest.mark.parametrize(
    ("found", "status"), [(figures(), 0), (figures(cpu_seconds=2.6), 1), (figures(num_misses=1), 1)]
)
def test_bench_fails_over_its_limit(
    found: scrape.Figures,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(scrape, "run", lambda *_: found)

    assert scrape.main([]) == status
    assert f"{found.core_ratio:.1%} of one core" in capsys.readouterr().out
