# One verb per job. Everything runs in .venv, which the first verb makes.
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin

.PHONY: gate test mutations bench lint format docs notebooks record proof clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[dev,demo]'
	touch $@

gate: $(VENV)/.installed       ## the main job: every check of every op, then the token streams
	$(BIN)/vtlab gate

test: $(VENV)/.installed       ## the tests
	$(BIN)/pytest parity/

mutations: $(VENV)/.installed  ## plant every wrong; the gate must notice each
	$(BIN)/pytest parity/ -m mutation --replant

bench: $(VENV)/.installed      ## microbenches, with PyTorch beside them where it is installed
	$(BIN)/pytest benches/

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

record: $(VENV)/.installed     ## run the whole gate and write parity/records/oracle.json, then the pages made from it
	$(BIN)/vtlab gate --record
	$(BIN)/python -m vtlab.parity.pages

docs: $(VENV)/.installed       ## generate the pages and build the site
	$(BIN)/python -m vtlab.parity.pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

notebooks: $(VENV)/.installed  ## run the notebooks
	mkdir -p build/notebooks
	for n in docs/notebooks/*.py; do $(BIN)/jupytext --quiet --to ipynb --output build/notebooks/$$(basename $$n .py).ipynb $$n; done
	cd build/notebooks && ../../$(BIN)/pytest --nbmake .

proof: $(VENV)/.installed      ## prove the transcendental functions over all float32 values (long; resumes)
	$(BIN)/python -m vtlab.parity.prove_numerics

clean:
	rm -rf $(VENV) site build .pytest_cache .ruff_cache
