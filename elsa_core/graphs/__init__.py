"""CUDA graphs of whole models: capture, what a graph may hold, and when it is out of date."""
