"""Whole models on the CPU beside llama.cpp on the same file, threads and machine, turn by turn."""
