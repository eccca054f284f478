#!/bin/sh
# Run the tests as other processors would, which round differently: `make portable`.
# The settings choose the kernels of older processors in oneDNN, PyTorch and MKL, and two threads.
status=0
run() {
    echo "== $*"
    env "$@" pytest || status=1
}
run ONEDNN_MAX_CPU_ISA=SSE41
run ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2
run ATEN_CPU_CAPABILITY=default
run MKL_ENABLE_INSTRUCTIONS=AVX2 OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive PYTEST_XDIST_AUTO_NUM_WORKERS=1
exit $status
