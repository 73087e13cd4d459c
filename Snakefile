# Conditions x seeds x notebooks of a preset; the page nbs/16_sweep.ipynb explains it.
#   snakemake --cores 2 --config preset=default
#   snakemake --cores 2 --config preset=smoke conditions=none,ape+ape_init=1.0 seeds=0,1 runs_dir=runs
#   snakemake --profile nbs/profiles/slurm --config preset=imagenet100 data=... class_list=... device=cuda
import os
import re
import sys

sys.path.insert(0, str(workflow.basedir))
from vitposnb.config import OneLineError
from vitposnb.sweep import analyses, analysis_output, analysis_settings, arguments, estimate, plan, train_arguments, words

BASE = str(workflow.basedir)
GIVEN = dict(config)
try: RUNS = plan(GIVEN)
except OneLineError as e: sys.exit(f"{type(e).__name__}: {e}")
FIRST = next(iter(RUNS.values()))
FOLDER = os.path.join(BASE, os.path.expanduser(FIRST.runs_dir), FIRST.preset)
if os.path.relpath(FOLDER).split(os.sep)[0] != "..": FOLDER = os.path.relpath(FOLDER)
CHOSEN = {k: v for k, v in analyses(os.path.join(BASE, "nbs")).items() if k in (words(GIVEN.get("analyses")) or [k])}
GPU = int(FIRST.device.startswith("cuda"))
LARGE = FIRST.img_size > 64

# A folder with trained weights is never deleted by a failed job.
if workflow.execution_settings: workflow.execution_settings.keep_incomplete = True
if workflow.is_main_process: print(estimate(list(RUNS.values()), os.path.dirname(FOLDER)), file=sys.stderr)


wildcard_constraints:
    run="|".join(map(re.escape, RUNS)),


rule all:
    input:
        expand(f"{FOLDER}/{{run}}/manifest.json", run=RUNS),
        [f"{FOLDER}/{run}/{analysis_output(a, kind, cfg, GIVEN)}/manifest.json" for run, cfg in RUNS.items() for a, kind in CHOSEN.items()],


rule train:
    output:
        manifest=update(f"{FOLDER}/{{run}}/manifest.json"),
        weights=update(f"{FOLDER}/{{run}}/model.safetensors"),
    log: f"{FOLDER}/{{run}}.train.ipynb",
    params:
        words=lambda w: ["--cwd", BASE, *train_arguments(RUNS[w.run], GIVEN)],
        notebook=os.path.join(BASE, "nbs", "train.ipynb"),
    threads: FIRST.threads
    resources:
        mem_mb=32000 if LARGE else 4000,
        runtime=2880 if LARGE else 120,
        gpu=GPU,
    shell: "papermill {params.notebook:q} {log:q} --no-progress-bar {params.words:q} < /dev/null"


for analysis, kind in CHOSEN.items():
    rule:
        name: analysis
        input:
            manifest=ancient(f"{FOLDER}/{{run}}/manifest.json"),
            weights=ancient(f"{FOLDER}/{{run}}/model.safetensors"),
        output: update(f"{FOLDER}/{{run}}/{analysis_output(analysis, kind, FIRST, GIVEN)}/manifest.json"),
        log: f"{FOLDER}/{{run}}.{analysis}.ipynb",
        params:
            words=lambda w, input, kind=kind: ["--cwd", BASE, "-r", "run", os.path.abspath(os.path.dirname(input.manifest)),
                                               *arguments(analysis_settings(kind, RUNS[w.run], GIVEN))],
            notebook=os.path.join(BASE, "nbs", f"{analysis}.ipynb"),
        threads: 1
        resources:
            mem_mb=16000 if LARGE else 4000,
            runtime=720 if LARGE else 120,
            gpu=GPU,
        shell: "papermill {params.notebook:q} {log:q} --no-progress-bar {params.words:q} < /dev/null"
