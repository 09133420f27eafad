"""A folder that passes for a model before anything is loaded."""

from pathlib import Path


def stub_model(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").touch()
    return folder
