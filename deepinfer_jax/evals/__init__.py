"""Evaluation of models: checkable tasks (`tasks.py`), the demo evaluation (`demo.py`) and its command."""
