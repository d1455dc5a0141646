# Each target works as the first and only command after a clone: it makes .venv and installs what it needs, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
AIRFLOW := .venv-airflow
PEERS := .venv-peers
IGNEOUS := .venv-igneous
READY := $(VENV)/.ready

.PHONY: setup demo test test-all test-gpu lint type format bench bench-gpu bench-peers igneous-test load airflow-test airflow-parse clean
.DEFAULT_GOAL := setup

setup: $(READY)

$(READY): requirements.txt setup.py
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or later is needed; found " + sys.version.split()[0] + ". Name another one: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

demo: $(READY)  ## segment a brain MRI template, verify the result, draw it: demo-output/tissue.png
	$(BIN)/beam-inference demo

test: $(READY)  ## everything but what is slow; under ten minutes on two cores
	$(BIN)/python -m pytest

test-all: $(READY)  ## the slow tests too
	$(BIN)/python -m pytest -m "not gpu"

test-gpu: $(READY)  ## those that need a CUDA device
	$(BIN)/python -m pytest -m gpu

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## measure, and write benchmarks/results
	$(BIN)/python -m benchmarks.bench

bench-gpu: $(READY)  ## the same on a GPU: benchmarks/results/job-cuda.json
	$(BIN)/python -m benchmarks.bench --device cuda

bench-peers: $(READY) $(PEERS)/.ready  ## the patch loop against MONAI, nnU-Net, torchio and chunkflow; half an hour
	$(BIN)/python -m benchmarks.peers --python $(PEERS)/bin/python

$(PEERS)/.ready: benchmarks/peers-requirements.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/peers-requirements.txt
	touch $@

igneous-test: $(READY) $(IGNEOUS)/.ready  ## pyramids against igneous's, which is in an environment of its own; some minutes
	IGNEOUS_PYTHON=$(CURDIR)/$(IGNEOUS)/bin/python $(BIN)/python -m pytest tests/igneous -m slow -s

$(IGNEOUS)/.ready: tests/igneous/requirements.txt
	$(PYTHON) -m venv $(IGNEOUS)
	$(IGNEOUS)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/igneous/requirements.txt
	touch $@

load: $(READY)  ## a null network over 10^5 chunks: what the engine costs; some ten minutes
	$(BIN)/python -m benchmarks.load

airflow-test: $(READY) $(AIRFLOW)/.ready  ## the DAGs in a real Airflow, in an environment of its own; some ten minutes
	AIRFLOW_PYTHON=$(CURDIR)/$(AIRFLOW)/bin/python $(BIN)/python -m pytest tests/airflow

airflow-parse: $(READY) $(AIRFLOW)/.ready  ## of these tests, the quick ones: that the DAGs parse, and what their forms refuse
	AIRFLOW_PYTHON=$(CURDIR)/$(AIRFLOW)/bin/python $(BIN)/python -m pytest tests/airflow/test_parsing.py

$(AIRFLOW)/.ready: templates/airflow/requirements.txt templates/airflow/constraints.txt
	$(PYTHON) -m venv $(AIRFLOW)
	$(AIRFLOW)/bin/python -m pip install --quiet --disable-pip-version-check -r templates/airflow/requirements.txt
	touch $@

clean:
	rm -rf $(VENV) $(AIRFLOW) $(PEERS) $(IGNEOUS) build dist demo-output *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Dataflow, see docs/dataflow.md. Variables may stand in the environment: make image PROJECT=… REGION=…
REPOSITORY ?= inference
TAG ?= $(shell git rev-parse --short HEAD)
DOCKERFILE ?= templates/flex/Dockerfile
IMAGE ?= $(REGION)-docker.pkg.dev/$(PROJECT)/$(REPOSITORY)/beam-inference:$(TAG)
TEMPLATE ?= gs://$(BUCKET)/templates/beam-inference-$(TAG).json
NAME ?= beam-inference-$(shell date +%Y%m%d-%H%M%S)
WORKERS ?= 1
LAUNCHER ?= n1-standard-2
comma := ,
needs = $(foreach name,$(1),$(if $($(name)),,$(error $(name) is not set. Say make $@ $(name)=…; see docs/dataflow.md)))

.PHONY: hadolint metadata image template-build template-run

hadolint: $(READY)  ## lint the Dockerfiles
	$(BIN)/hadolint templates/flex/Dockerfile templates/flex/Dockerfile.cpu

metadata: $(READY)  ## write the template's form anew, from the flags
	$(BIN)/python -m beam_inference.cli.flex_template > templates/flex/metadata.json.new
	mv templates/flex/metadata.json.new templates/flex/metadata.json

image:  ## build and push the image of launcher and workers, in Cloud Build
	$(call needs,PROJECT REGION)
	gcloud builds submit --project=$(PROJECT) --config=templates/flex/cloudbuild.yaml \
		--substitutions=_IMAGE=$(IMAGE),_DOCKERFILE=$(DOCKERFILE),_REVISION=$(TAG) .

template-build:  ## write the Flex Template of an image to the bucket
	$(call needs,PROJECT REGION BUCKET)
	gcloud dataflow flex-template build $(TEMPLATE) --project=$(PROJECT) --image=$(IMAGE) --sdk-language=PYTHON \
		--metadata-file=templates/flex/metadata.json

template-run:  ## run a job: JOB=gs://…/job.yaml, and GPU=l4 for GPUs
	$(call needs,PROJECT REGION BUCKET JOB WORKER)
	gcloud dataflow flex-template run $(NAME) --project=$(PROJECT) --region=$(REGION) \
		--template-file-gcs-location=$(TEMPLATE) --service-account-email=$(WORKER) \
		--launcher-machine-type=$(LAUNCHER) --num-workers=$(WORKERS) --max-workers=$(WORKERS) \
		--staging-location=gs://$(BUCKET)/staging --temp-location=gs://$(BUCKET)/temp \
		--parameters=job=$(JOB)$(comma)sdk_container_image=$(IMAGE)$(comma)log_format=json$(if $(GPU),$(comma)gpu=$(GPU))
