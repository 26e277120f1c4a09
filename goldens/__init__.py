"""Pinned results of vLLM 0.26.0: token streams, op inputs and outputs, and the tiny checkpoints behind them."""
