"""``python -m sglang_spec_ext.ops.bench``, for where no console script is installed."""

from sglang_spec_ext.ops.bench.command import bench

if __name__ == "__main__":
    bench(prog_name="sglang-spec-ext bench")
