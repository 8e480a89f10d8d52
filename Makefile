# Shortcuts; launch.sh does the work.
.PHONY: serve test lint format clean

serve:
	./launch.sh

test:
	./launch.sh test

lint:
	.venv/bin/python -m ruff check
	.venv/bin/python -m mypy

format:
	.venv/bin/python -m ruff check --fix
	.venv/bin/python -m ruff format

clean:
	rm -rf .venv .venv.lock .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
