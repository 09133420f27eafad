"""xgrammar by its native functions alone.

The package's own Python modules import torch and transformers, which takes
seconds and half a gigabyte; neither the compiler nor the matcher needs them.
Nothing here is imported before the first request that needs it.
"""

import importlib
import importlib.util
import os
import re
import sys
from functools import cache
from types import ModuleType
from typing import Any

_WHERE = re.compile(r"^\[\d\d:\d\d:\d\d\] \S+:\d+: (Check failed: \(.*?\) is false: )?")
"""Time, source line and check, which xgrammar puts before what it says."""


NUM_THREADS = 2
"""Threads that make the masks of one grammar."""


@cache
def library() -> Any:
    """The native classes: TokenizerInfo, GrammarCompiler, CompiledGrammar,
    GrammarMatcher, Grammar.
    """
    # Masks are numpy arrays: the bridge to torch would be compiled, in the user's cache.
    os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")
    if "xgrammar" not in sys.modules:
        found = importlib.util.find_spec("xgrammar")
        assert found is not None, "xgrammar is a dependency of the worker"
        package = ModuleType("xgrammar")
        package.__path__ = list(found.submodule_search_locations or ())
        sys.modules["xgrammar"] = package
    importlib.import_module("xgrammar.load_binding")
    return importlib.import_module("xgrammar.base")._core


def compiler_over(vocabulary: Any) -> Any:
    """A compiler that keeps nothing; two threads make masks."""
    return library().GrammarCompiler(vocabulary, NUM_THREADS, False, -1)


def complaint(error: Exception) -> str:
    """Complaint of xgrammar, in one line."""
    return " ".join(_WHERE.sub("", str(error)).split())
