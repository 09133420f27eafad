"""`python -m pdctl` is `pdctl`, in its help and its completion too."""

from pdctl.cli.main import app

if __name__ == "__main__":
    app(prog_name="pdctl")
