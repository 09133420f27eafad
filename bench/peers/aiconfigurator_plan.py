"""AIConfigurator's own best placements for one case, as a line of JSON.

    PEER_PYTHON bench/peers/aiconfigurator_plan.py MODEL SYSTEM ENGINE GPUS INPUT OUTPUT TTFT ITL

PEER_PYTHON has `aiconfigurator`, which is apart from the package that pdctl uses: it brings the
search of its command line, and wants other versions of our own packages.
"""

import json
import logging
import sys
import warnings

LAYOUT = ("workers", "parallel", "tp", "dp", "moe_tp", "moe_ep", "bs")


def main() -> None:
    model, system, engine = sys.argv[1:4]
    gpus, input_tokens, output_tokens = map(int, sys.argv[4:7])
    ttft_seconds, itl_seconds = map(float, sys.argv[7:9])
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    from aiconfigurator.cli.api import cli_default

    try:
        found = cli_default(
            model,
            gpus,
            system,
            backend=engine,
            isl=input_tokens,
            osl=output_tokens,
            ttft=1e3 * ttft_seconds,
            tpot=1e3 * itl_seconds,
            strict_sla=True,
            top_n=1,
        )
    except Exception as e:  # what it has no answer for is a hole of the table
        print(json.dumps({"hole": f"{type(e).__name__}: {e}"[:300]}))
        return
    best: dict[str, dict[str, object]] = {}
    for name, frame in found.best_configs.items():
        if len(frame):
            row = frame.iloc[0]
            columns = ("tokens/s/gpu", "ttft", "tpot", "tokens/s/gpu_cluster")
            best[name] = {column: float(row[column]) for column in columns if column in row}
            layout = [f"{at}{what}" for at in ("", "(p)", "(d)") for what in LAYOUT]
            best[name]["layout"] = {each: str(row[each]) for each in layout if each in row}
    print(json.dumps(best))


if __name__ == "__main__":
    main()
