"""Builds the extension; everything else about the package is in pyproject.toml."""

from glob import glob

from Cython.Build import cythonize
from setuptools import Extension, setup

EXT = "hvd_fec/_ext"
PYX = f"{EXT}/_kernels.pyx"

kernels = Extension(
    "hvd_fec._ext._kernels",
    sources=[PYX, *sorted(glob(f"{EXT}/*.c"))],
    # Rebuild when one of these changes; setuptools also puts them in the sdist.
    depends=[PYX, *sorted(glob(f"{EXT}/*.pxd") + glob(f"{EXT}/*.h"))],
    include_dirs=[EXT],
    libraries=["m"],
    # Every rank must compute the same bits, whatever its CPU: hence no
    # -march=native, no -ffast-math, and no fused multiply-add where the source
    # has none. -fno-math-errno changes no result; it lets sqrt and the like be
    # inlined.
    extra_compile_args=[
        "-O3",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-std=gnu11",
        "-Wall",
        "-Wextra",
    ],
)

setup(
    ext_modules=cythonize(
        [kernels],
        # Keeps the generated C out of EXT, where the glob above would take it
        # for a hand-written source on the next build.
        build_dir="build/cython",
        compiler_directives={
            "language_level": 3,
            "boundscheck": False,
            "wraparound": False,
        },
    ),
)
