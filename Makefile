# Each target works as the first command after a clone: it creates .venv and installs what it needs, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
AIRFLOW := .venv-airflow
PEERS := .venv-peers
IGNEOUS := .venv-igneous
INTEROP := .venv-interop
BIOIMAGEIO := .venv-bioimageio
FLINK := .venv-flink
SPARK := .venv-spark
COMPOSE := .venv-compose
READY := $(VENV)/.ready

.PHONY: help setup demo test test-all test-gpu lint type format bench bench-gpu bench-peers bench-nnunet bench-flink igneous-test interop-test flink-test spark-test prism-test recipes-test load chaos fuzz airflow-test airflow-parse clean
.DEFAULT_GOAL := setup

help:  ## list the targets
	@sed -n 's/^\([a-z][a-z-]*\):[^#]*## \(.*\)/\1@\2/p' $(MAKEFILE_LIST) | awk -F@ '{ printf "%-16s %s\n", $$1, $$2 }'

setup: $(READY)  ## create .venv and install the package (the default target)

$(READY): requirements.txt setup.py
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or later is needed; found " + sys.version.split()[0] + ". Name another one: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

demo: $(READY)  ## segment a brain MRI template, verify the result and draw it: demo-output/tissue.png
	$(BIN)/beam-inference demo

# One more than cores: a quarter of the time tests wait for processes, stores and clocks.
PROCESSES = $$($(BIN)/python -c "import os; print(min(4, os.cpu_count() + 1))")

test: $(READY)  ## run all tests but the slow ones; about thirteen minutes on two cores
	$(BIN)/python -m pytest --numprocesses=$(PROCESSES) --dist=worksteal

test-all: $(READY)  ## run all tests, also the slow ones
	$(BIN)/python -m pytest -m "not gpu"

test-gpu: $(READY)  ## run the tests that need a GPU
	$(BIN)/python -m pytest -m gpu

lint: $(READY)  ## check the code with ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(READY)  ## check the types with mypy
	$(BIN)/mypy

format: $(READY)  ## format the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## run the benchmarks, and write benchmarks/results
	$(BIN)/python -m benchmarks.bench

bench-gpu: $(READY)  ## measure a GPU in eight minutes at most; PRICES="1.2 3" in dollars per hour
	$(BIN)/python -m benchmarks.gpu --dollars-per-hour $(PRICES)

bench-peers: $(READY) $(PEERS)/.ready  ## compare the patch loop with MONAI, nnU-Net, torchio and chunkflow; half an hour
	$(BIN)/python -m benchmarks.peers --python $(PEERS)/bin/python

bench-nnunet: $(READY) $(INTEROP)/.ready  ## compare a whole results folder with nnU-Net; half an hour
	PYTHONPATH=.:tests $(BIN)/python -m benchmarks.nnunet --python $(INTEROP)/bin/python

bench-flink: $(READY) $(FLINK)/.ready  ## compare two Flink workers with two local processes; needs Java 17; a quarter of an hour
	PYTHONPATH=.:tests $(BIN)/python -m benchmarks.on_flink --environment $(FLINK)

$(PEERS)/.ready: benchmarks/peers-requirements.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/peers-requirements.txt
	touch $@

igneous-test: $(READY) $(IGNEOUS)/.ready  ## compare pyramids with those of igneous, and OME-Zarr with its models, in an environment of their own; some minutes
	IGNEOUS_PYTHON=$(CURDIR)/$(IGNEOUS)/bin/python $(BIN)/python -m pytest tests/igneous -m slow -s

$(IGNEOUS)/.ready: tests/igneous/requirements.txt
	$(PYTHON) -m venv $(IGNEOUS)
	$(IGNEOUS)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/igneous/requirements.txt
	touch $@

interop-test: $(READY) $(INTEROP)/.ready $(BIOIMAGEIO)/.ready  ## compare results with those of nnU-Net, MONAI, topaz, deepbet and bioimageio.core, in environments of their own; some minutes
	INTEROP_PYTHON=$(CURDIR)/$(INTEROP)/bin/python BIOIMAGEIO_PYTHON=$(CURDIR)/$(BIOIMAGEIO)/bin/python $(BIN)/python -m pytest tests/interop -m slow -s

$(INTEROP)/.ready: tests/interop/requirements.txt
	$(PYTHON) -m venv $(INTEROP)
	$(INTEROP)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/interop/requirements.txt
	touch $@

$(BIOIMAGEIO)/.ready: tests/interop/bioimageio-requirements.txt
	$(PYTHON) -m venv $(BIOIMAGEIO)
	$(BIOIMAGEIO)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/interop/bioimageio-requirements.txt
	touch $@

# Job servers are those that FLINK_JOB_SERVER_JAR, SPARK_JOB_SERVER_JAR and PRISM_LOCATION name; otherwise Beam downloads them.
ENGINE_TEST = KEEP_RESULTS=1 DOWNLOAD_JOB_SERVERS=1 $(BIN)/python -m pytest -m slow -rs tests/end_to_end/test_clusters.py tests/end_to_end/test_own_job_servers.py

flink-test: $(READY) $(FLINK)/.ready  ## run jobs on a real Flink cluster of two hosts on this machine; needs Java 17; half an hour
	PYFLINK_ENVIRONMENT=$(CURDIR)/$(FLINK) $(ENGINE_TEST) -k Flink

$(FLINK)/.ready: tests/clusters/flink-requirements.txt
	$(PYTHON) -m venv $(FLINK)
	$(FLINK)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/clusters/flink-requirements.txt
	touch $@

spark-test: $(READY) $(SPARK)/.ready  ## run jobs on a real Spark cluster of two hosts on this machine; needs Java 17; half an hour
	PYSPARK_ENVIRONMENT=$(CURDIR)/$(SPARK) $(ENGINE_TEST) -k Spark

$(SPARK)/.ready: tests/clusters/spark-requirements.txt
	$(PYTHON) -m venv $(SPARK)
	$(SPARK)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/clusters/spark-requirements.txt
	touch $@

prism-test: $(READY)  ## run jobs on Prism
	$(ENGINE_TEST) -k Prism

recipes-test: $(READY) $(COMPOSE)/.ready  ## check the recipe for Docker Compose by its schema
	COMPOSE_SCHEMA=$$(ls $(CURDIR)/$(COMPOSE)/lib/python*/site-packages/compose/config/compose_spec.json) $(BIN)/python -m pytest tests/templates

# The last release in Python has the schema as a file; its dependencies are not wanted.
$(COMPOSE)/.ready:
	$(PYTHON) -m venv $(COMPOSE)
	$(COMPOSE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps docker-compose==1.29.2
	touch $@

load: $(READY)  ## run a null network over 10^5 chunks, to measure the overhead; about ten minutes
	$(BIN)/python -m benchmarks.load

SECONDS ?= 600
chaos: $(READY)  ## disturb jobs at random for SECONDS=600, or repeat SEED=7 ROUND=3; see docs/guarantees.md
	PYTHONPATH=.:tests $(BIN)/python -m chaos --seconds $(SECONDS) $(foreach name,SEED ROUND CREW CHUNKS DISTURBED,$(if $($(name)),--$(shell echo $(name) | tr A-Z a-z) $($(name))))

fuzz: $(READY) $(VENV)/.fuzz  ## try hostile bytes on every parser for SECONDS=600; see docs/guarantees.md
	PYTHONPATH=.:tests $(BIN)/python -m fuzz.run --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

$(VENV)/.fuzz: setup.py $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[fuzz]'
	touch $@

airflow-test: $(READY) $(AIRFLOW)/.ready  ## test the DAGs in a real Airflow, in an environment of its own; about ten minutes
	AIRFLOW_PYTHON=$(CURDIR)/$(AIRFLOW)/bin/python $(BIN)/python -m pytest tests/airflow

airflow-parse: $(READY) $(AIRFLOW)/.ready  ## run the quick ones of these tests: the DAGs parse, and their forms refuse bad input
	AIRFLOW_PYTHON=$(CURDIR)/$(AIRFLOW)/bin/python $(BIN)/python -m pytest tests/airflow/test_parsing.py

$(AIRFLOW)/.ready: templates/airflow/requirements.txt templates/airflow/constraints.txt
	$(PYTHON) -m venv $(AIRFLOW)
	$(AIRFLOW)/bin/python -m pip install --quiet --disable-pip-version-check -r templates/airflow/requirements.txt
	touch $@

clean:  ## remove the environments, builds and caches
	rm -rf $(VENV) $(AIRFLOW) $(PEERS) $(IGNEOUS) $(INTEROP) $(FLINK) $(SPARK) $(COMPOSE) build dist demo-output *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Dataflow, see docs/dataflow.md. Variables may be in the environment, or be given: make image PROJECT=… REGION=…
REPOSITORY ?= inference
TAG ?= $(shell git rev-parse --short HEAD)
DOCKERFILE ?= templates/flex/Dockerfile
IMAGE ?= $(REGION)-docker.pkg.dev/$(PROJECT)/$(REPOSITORY)/beam-inference:$(TAG)
TEMPLATE ?= gs://$(BUCKET)/templates/beam-inference-$(TAG).json
NAME ?= beam-inference-$(shell date +%Y%m%d-%H%M%S)
WORKERS ?= 1
LAUNCHER ?= n1-standard-2
comma := ,
needs = $(foreach name,$(1),$(if $($(name)),,$(error $(name) is not set. Run make $@ $(name)=…; see docs/dataflow.md)))

.PHONY: hadolint metadata image template-build template-run

hadolint: $(READY)  ## lint the Dockerfiles
	$(BIN)/hadolint templates/flex/Dockerfile templates/flex/Dockerfile.cpu

metadata: $(READY)  ## generate the form of the Flex Template from the flags
	$(BIN)/python -m beam_inference.cli.flex_template > templates/flex/metadata.json.new
	mv templates/flex/metadata.json.new templates/flex/metadata.json

image:  ## build and push the image of launcher and workers, with Cloud Build
	$(call needs,PROJECT REGION)
	gcloud builds submit --project=$(PROJECT) --config=templates/flex/cloudbuild.yaml \
		--substitutions=_IMAGE=$(IMAGE),_DOCKERFILE=$(DOCKERFILE),_REVISION=$(TAG) .

template-build:  ## write the Flex Template of the image to the bucket
	$(call needs,PROJECT REGION BUCKET)
	gcloud dataflow flex-template build $(TEMPLATE) --project=$(PROJECT) --image=$(IMAGE) --sdk-language=PYTHON \
		--metadata-file=templates/flex/metadata.json

template-run:  ## run a job from the template: JOB=gs://…/job.yaml, and GPU=l4 for GPUs
	$(call needs,PROJECT REGION BUCKET JOB WORKER)
	gcloud dataflow flex-template run $(NAME) --project=$(PROJECT) --region=$(REGION) \
		--template-file-gcs-location=$(TEMPLATE) --service-account-email=$(WORKER) \
		--launcher-machine-type=$(LAUNCHER) --num-workers=$(WORKERS) --max-workers=$(WORKERS) \
		--staging-location=gs://$(BUCKET)/staging --temp-location=gs://$(BUCKET)/temp \
		--parameters=job=$(JOB)$(comma)sdk_container_image=$(IMAGE)$(comma)log_format=json$(if $(GPU),$(comma)gpu=$(GPU))
