#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "bounds.hpp"
#include "experts/cpu/cpu_experts.hpp"

/// Layers on the kernels for matrix units: on the unit of this machine, or on its emulation in portable code.
namespace fusedmoe::cpu_test {

inline Layer TileLayer(const LayerSpec& spec, const std::string& mode = "throughput") {
  Layer layer = MakeLayer(spec);
  layer.problem.isa = "amx";
  layer.problem.mode = mode;
  return layer;
}

inline Runner MakeTileRunner(const Layer& layer, const Machine& machine = MachineWithTiles()) {
  return MakeRunnerOn(machine, layer);
}

inline void ExpectClose(const LayerSpec& spec, std::initializer_list<int64_t> token_counts,
                        bool tiles = true) {
  const Layer layer = TileLayer(spec);
  const Definition definition(layer);
  const Runner runner = MakeTileRunner(layer);
  EXPECT_EQ(static_cast<const cpu::CpuExperts&>(*runner.experts).matrix_unit() != nullptr, tiles)
      << spec.scheme;
  for (const int64_t tokens : token_counts) {
    const Batch batch = MakeBatch(spec, tokens, static_cast<uint32_t>(17 + tokens));
    const double error = RelativeL2(RunBatch(layer, runner, batch), definition.Forward(batch));
    EXPECT_LE(error, BoundOf(spec, "amx")) << spec.scheme << " tokens=" << tokens << " hidden=" << spec.hidden
                                           << " intermediate=" << spec.intermediate;
  }
}

inline Batch TokensOf(const Batch& batch, const LayerSpec& spec, int64_t first, int64_t count) {
  Batch part = batch;
  part.tokens = count;
  const int64_t begin = first * spec.top_k, end = (first + count) * spec.top_k;
  part.ids.assign(batch.ids.begin() + begin, batch.ids.begin() + end);
  part.weights.assign(batch.weights.begin() + begin, batch.weights.begin() + end);
  part.hidden = *Tensor::Allocate(spec.dtype, Shape{count, spec.hidden});
  std::memcpy(part.hidden.mutable_view().data(),
              batch.hidden.view().data() + first * batch.hidden.view().stride_bytes(0),
              static_cast<size_t>(count * batch.hidden.view().row_bytes()));
  return part;
}

/// On one thread, and on 2, 3 and 7 that a plan knows of.
inline void ExpectSameBits(const LayerSpec& spec, const Batch& batch, const std::string& mode,
                           const Machine& machine = MachineWithTiles()) {
  Layer layer = TileLayer(spec, mode);
  const Runner single = MakeTileRunner(layer, machine);
  const std::vector<float> one = RunBatch(layer, single, batch);
  for (const int threads : {2, 3, 7}) {
    layer.problem.num_threads = threads;
    const Runner runner = MakeTileRunner(layer, machine);
    const auto pool = *ThreadPool::Create(threads);
    EXPECT_EQ(RunBatch(layer, runner, batch, pool->executor()), one) << spec.scheme << " " << threads;
    EXPECT_EQ(RunBatch(layer, single, batch, pool->executor()), one) << spec.scheme << " planned for one";
  }
}

}  // namespace fusedmoe::cpu_test
