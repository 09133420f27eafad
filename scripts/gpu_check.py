"""Check the `cuda` operations on the GPU of this machine, as no CI of ours can.

In this order: every case of the operations and of the staged cache against the
reference; the tokens of the sample model on the GPU beside those on the CPU, both
in float32; tokens chosen on the GPU beside the host's choice; times of steps beside
the roofline.  Exits 2 where there is no GPU, 1
where a check fails.

    gpu_check.py [--model FOLDER]
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
CASES = (
    "tests/worker/model/ops/test_cuda_operations.py",
    "tests/worker/model/ops/test_cuda_sampling.py",
    "tests/worker/model/test_device_cache.py",
)
PROMPTS = ([1, 2, 3], list(range(5, 300)), [7] * 33)
NUM_TOKENS = 24


def main() -> int:
    """Run all checks; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", type=Path, help="a model folder; without one no tokens are compared"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: torch finds no CUDA device, so nothing was checked")
        return 2
    print(f"GPU: {torch.cuda.get_device_name(0)}, torch {torch.__version__}", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CASES]
    status = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PDCLUSTER_GPU_CHECK": "1"}, check=False
    ).returncode
    if status != 0:
        return 1
    if arguments.model is not None and not _tokens_agree(arguments.model):
        return 1
    import gpu_figures
    import gpu_sampling

    if not gpu_sampling.report():
        return 1
    gpu_figures.report()
    return 0


def _tokens_agree(folder: Path) -> bool:
    """Greedy tokens of the same prompts on both devices, in float32."""
    on_cpu, on_gpu = (_tokens(folder, device) for device in ("cpu", "cuda"))
    for index, (wanted, found) in enumerate(zip(on_cpu, on_gpu, strict=True)):
        same = "equal" if wanted == found else f"NOT equal:\n  cpu  {wanted}\n  cuda {found}"
        print(f"prompt {index}, {NUM_TOKENS} tokens: {same}", flush=True)
    return on_cpu == on_gpu


def _tokens(folder: Path, device: str) -> list[list[int]]:
    """Runs in a process of its own: two models share no memory, and neither its threads."""
    command = [
        sys.executable,
        str(ROOT / "scripts" / "gpu_tokens.py"),
        str(folder),
        device,
        str(NUM_TOKENS),
    ]
    prompts = "\n".join(" ".join(map(str, prompt)) for prompt in PROMPTS)
    found = subprocess.run(command, input=prompts, stdout=subprocess.PIPE, text=True, check=True)
    return [[int(token) for token in line.split()] for line in found.stdout.splitlines()]


if __name__ == "__main__":
    sys.exit(main())
