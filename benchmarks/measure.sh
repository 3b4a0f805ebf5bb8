#!/usr/bin/env bash
# Everything behind the committed results, on one card that is not SM8x: benchmarks/measure.sh SITE TREE30 OUT
#   SITE: folder that holds vLLM 0.33.0; TREE30: folder that holds vLLM 0.30.0, for the torch baseline; OUT: for the files
# Run it with torch, triton, tilelang and DeepInfer's own packages importable. The scripts take turns on the GPU, and
# compile side by side; the combiner, whose baseline waits for the host, and `verify` come after them, alone.
set -uo pipefail
cd "$(dirname "$0")/.."
site=$1 tree30=$2 out=$3
python=${PYTHON:-python3}
summary=$out/sm80_benchmark_summary.json
mkdir -p "$out"
rm -f "$summary"

measure() { # log, script, arguments
  PYTHONPATH=$site:${PYTHONPATH:-} "$python" "benchmarks/microbench_sm80_$2.py" "${@:3}" --target "$site" --merge "$summary" \
    ${COMMIT:+--commit "$COMMIT"} >"$out/$1.log" 2>&1
  echo "$1: exit $?, $SECONDS s"
}

measure mhc part2 --arch sm80 &
measure kernels kernels --arch sm80 &
measure sm86 kernels --arch sm86 --op sparse_prefill --op sparse_decode &
measure small kernels --arch sm80 --max-smem 49152 --op sparse_prefill --op sparse_decode &
wait
measure indices part3 --arch sm80 --torch-from "$tree30"
"$python" -m deepinfer_cli verify --arch sm80 --suite full --level compile --level numerics --output "$out/verify.json" >"$out/verify.log" 2>&1
echo "verify: exit $?, $SECONDS s"
