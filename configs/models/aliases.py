"""Other published names of the packaged presets, and the keys in which they differ.

Names without an owner, in lower case. Only keys that the program reads are listed.
"""

from __future__ import annotations

from typing import Any

_SAME = {
    "gemma-3-12b": "gemma-3-12b-pt",
    "gemma-3-12b-it": "gemma-3-12b-pt",
    "gemma-3-1b": "gemma-3-1b-pt",
    "gemma-3-1b-it": "gemma-3-1b-pt",
    "gemma-3-270m-it": "gemma-3-270m",
    "gemma-3-27b": "gemma-3-27b-pt",
    "gemma-3-27b-it": "gemma-3-27b-pt",
    "gemma-3-4b": "gemma-3-4b-pt",
    "gemma-3-4b-it": "gemma-3-4b-pt",
    "llama-2-13b": "llama-2-13b-hf",
    "llama-2-13b-chat-hf": "llama-2-13b-hf",
    "llama-2-70b": "llama-2-70b-hf",
    "llama-2-70b-chat-hf": "llama-2-70b-hf",
    "llama-2-7b": "llama-2-7b-hf",
    "llama-2-7b-chat-hf": "llama-2-7b-hf",
    "llama-3-70b": "meta-llama-3-70b",
    "llama-3-8b": "meta-llama-3-8b",
    "llama-3.1-405b-instruct": "llama-3.1-405b",
    "llama-3.1-70b-instruct": "llama-3.1-70b",
    "llama-3.1-8b-instruct": "llama-3.1-8b",
    "llama-3.2-1b-instruct": "llama-3.2-1b",
    "llama-3.2-3b-instruct": "llama-3.2-3b",
    "llama-3.3-70b": "llama-3.3-70b-instruct",
    "meta-llama-3-70b-instruct": "meta-llama-3-70b",
    "meta-llama-3-8b-instruct": "meta-llama-3-8b",
    "mistral-7b-instruct-v0.1": "mistral-7b-v0.1",
    "mistral-7b-instruct-v0.3": "mistral-7b-v0.3",
    "qwen3-4b-thinking-2507": "qwen3-4b-instruct-2507",
}
_QWEN25_INSTRUCT = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
_QWEN3_BASE = {"max_position_embeddings": 32768}
_QWEN25_SIZES = ("0.5b", "1.5b", "3b", "7b", "14b", "32b", "72b")
_QWEN3_SIZES = ("0.6b", "1.7b", "4b", "8b", "14b")

ALIASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{alias: (preset, {}) for alias, preset in _SAME.items()},
    **{f"qwen2.5-{s}-instruct": (f"qwen2.5-{s}", _QWEN25_INSTRUCT) for s in _QWEN25_SIZES},
    **{f"qwen3-{s}-base": (f"qwen3-{s}", _QWEN3_BASE) for s in _QWEN3_SIZES},
}
