// The kernels alone, one thread, by its CPU time: every micro-kernel with each kind and height of tile,
// weights in L2 and from memory, the kernels of the matrix unit, and those that make tiles. `ops` are two for
// each multiply-add, `share` those of the peak of the unit that the kernel runs on, measured in the same run;
// `bytes_per_second` are those of the weights.
//
//   kernel_bench [--benchmark_filter=nvfp4] [--isa=avx2] [--k=2048] [--ahead=7680] [--far=9216]
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <fusedmoe/probe.hpp>
#include <fusedmoe/workspace.hpp>

#include "ceilings.hpp"
#include "experts/cpu/kernels/kernels.hpp"

namespace fusedmoe::bench {
namespace {

using namespace cpu;  // NOLINT: everything here is about its kernels

struct Named {
  const char* name;
  WeightKernel kernel;
  PanelFormat panel;
};
const Named kKernels[] = {
    {"f32", kWeightF32, {DType::kF32}},
    {"bf16", kWeightBf16, {DType::kBF16}},
    {"f16", kWeightF16, {DType::kF16}},
    {"e4m3", kWeightE4m3, {DType::kF8E4M3}},
    {"e4m3_scaled", kWeightE4m3Scaled, {DType::kF8E4M3, PanelScale::kF32, 64}},
    {"e4m3_stripe", kWeightE4m3Stripe, {DType::kF8E4M3, PanelScale::kStripeF32, 64}},
    {"mxfp8", kWeightMxfp8, {DType::kF8E4M3, PanelScale::kE8M0, 32}},
    {"e5m2", kWeightE5m2, {DType::kF8E5M2}},
    {"nvfp4", kWeightNvfp4, {DType::kF4E2M1, PanelScale::kE4M3, 16}},
    {"mxfp4", kWeightMxfp4, {DType::kF4E2M1, PanelScale::kE8M0, 32}},
    {"mxfp6", kWeightMxfp6, {DType::kF6E3M2, PanelScale::kE8M0, 32}},
    {"u4", kWeightU4, {DType::kU4}},
    {"u4g16", kWeightU4Group16, {DType::kU4, PanelScale::kF32, 16}},
    {"u4g32", kWeightU4Group32, {DType::kU4, PanelScale::kBF16, 32}},
    {"u4g32_codes", kWeightU4Group32, {DType::kU4, PanelScale::kBF16, 32, 64, PanelZero::kBytes}},
    {"u4g32_numbers", kWeightU4Group32, {DType::kU4, PanelScale::kF32, 32, 64, PanelZero::kFloats}},
    {"u4g16_super", kWeightU4Super16, {DType::kU4, PanelScale::kI8, 16, 128, PanelZero::kMinima}},
    {"u4g32_super", kWeightU4Super32, {DType::kU4, PanelScale::kI8, 32, 128, PanelZero::kMinima}},
    {"u4g64", kWeightU4Group64, {DType::kU4, PanelScale::kBF16, 64}},
    {"u4g128", kWeightU4Group128, {DType::kU4, PanelScale::kBF16, 128, 128}},
    {"u8", kWeightU8, {DType::kU8}},
    {"u8g16", kWeightU8Group16, {DType::kU8, PanelScale::kF32, 16}},
    {"u8g32", kWeightU8Group32, {DType::kU8, PanelScale::kBF16, 32}},
    {"u8g32_numbers", kWeightU8Group32, {DType::kU8, PanelScale::kF32, 32, 64, PanelZero::kFloats}},
    {"u8g16_super", kWeightU8Super16, {DType::kU8, PanelScale::kI8, 16, 128}},
    {"u8g32_super", kWeightU8Super32, {DType::kU8, PanelScale::kI8, 32, 128, PanelZero::kMinima}},
    {"iq4g32", kWeightBookGroup32, {DType::kU4, PanelScale::kF16, 32, 64, PanelZero::kNone, Codebook::kIq4}},
    {"iq4g32_super",
     kWeightBookSuper32,
     {DType::kU4, PanelScale::kI8, 32, 128, PanelZero::kNone, Codebook::kIq4}},
    {"iq1g32_super",
     kWeightIq1Super32,
     {DType::kU8, PanelScale::kI8, 32, 128, PanelZero::kNone, Codebook::kIq1S, 3}},
    {"iq2g16_super",
     kWeightIq2Super16,
     {DType::kU8, PanelScale::kI8, 16, 128, PanelZero::kNone, Codebook::kIq2, 3}},
    {"iq2g32_super",
     kWeightIq2Super32,
     {DType::kU8, PanelScale::kI8, 32, 128, PanelZero::kNone, Codebook::kIq2, 3}},
    {"u2g16_super",
     kWeightU2Super16,
     {DType::kU8, PanelScale::kI8, 16, 128, PanelZero::kMinima, Codebook::kNone, 2}},
    {"u3g16_super",
     kWeightU3Super16,
     {DType::kU8, PanelScale::kI8, 16, 128, PanelZero::kNone, Codebook::kNone, 3}},
    {"u5g32", kWeightU5Group32, {DType::kU8, PanelScale::kF16, 32, 64, PanelZero::kNone, Codebook::kNone, 5}},
    {"u5g32_super",
     kWeightU5Super32,
     {DType::kU8, PanelScale::kI8, 32, 128, PanelZero::kMinima, Codebook::kNone, 5}},
    {"u6g16_super",
     kWeightU6Super16,
     {DType::kU8, PanelScale::kI8, 16, 128, PanelZero::kNone, Codebook::kNone, 6}},
    {"u8g64", kWeightU8Group64, {DType::kU8, PanelScale::kBF16, 64}},
    {"u8g128", kWeightU8Group128, {DType::kU8, PanelScale::kBF16, 128, 128}},
};
constexpr const char* kTiles[] = {"f32", "raised", "a24",  "a16",       "a8",
                                  "a4",  "mx",     "bf16", "bf16_pair", "f16"};

constexpr int64_t kBytes = int64_t{512} << 20;  // of weights, more than caches hold
constexpr int64_t kTileBytes = int64_t{4} << 20;

/// What all benchmarks share.
struct Bench {
  const KernelTable* table = nullptr;
  int64_t k = 2048;
  int64_t ahead = 7680;  ///< bytes, of prefetches of weights
  int64_t far = 0;       ///< of those into L2, where there are any
  Workspace memory;
  uint8_t* weights = nullptr;
  char* tile = nullptr;
  double int_peak = 1, float_peak = 1, bf16_peak = 1, f16_peak = 1, amx_bf16_peak = 1, amx_int8_peak = 1;

  double PeakOf(TileKind kind) const {
    switch (kind) {
      case kTileF32:
      case kTileRaised:
        return float_peak;
      case kTileBf16:
      case kTileBf16Pair:
        return bf16_peak;
      case kTileF16:
        return f16_peak;
      default:
        return int_peak;
    }
  }
};

/// What `seconds` of a benchmark came to.
void Count(benchmark::State& state, double seconds, double ops, double peak, int64_t bytes) {
  state.counters["ops"] = benchmark::Counter(ops, benchmark::Counter::kIsRate);
  state.counters["share"] = ops / seconds / peak;
  state.SetBytesProcessed(bytes);
}

/// Passes over `count` stripes, two at a time, as the layer walks.
void Dot(benchmark::State& state, const Bench& bench, const Named& named, TileKind kind, int height_index,
         bool cold) {
  const int64_t blocks = bench.k / named.panel.block;
  const int64_t stripe_bytes = named.panel.stripe_bytes(blocks);
  const int64_t bytes = cold ? kBytes - (int64_t{1} << 20) : int64_t{384} << 10;
  const int64_t count = std::max<int64_t>(2, bytes / stripe_bytes / 2 * 2);
  const int height = kHeights[height_index];
  TileView view = ViewTile(bench.tile, named.kernel, kind, bench.k, height);
  view.short_tile.prefetch = bench.ahead;
  view.short_tile.prefetch_far = bench.far;
  view.group_scales = GroupScalesOf(named.panel);
  const DotKernel dot = bench.table->dot[named.kernel][kind][height_index];
  alignas(64) static float out[2 * kMaxHeight * 16];
  const double begin = ThreadSeconds();
  for (auto _ : state) {
    for (int64_t stripe = 0; stripe < count; stripe += 2) {
      dot(bench.weights + stripe * stripe_bytes, 2, blocks, &view, out);
    }
    benchmark::ClobberMemory();
  }
  const double seconds = ThreadSeconds() - begin;
  const auto passes = static_cast<double>(state.iterations());
  const double ops = passes * 2.0 * static_cast<double>(count * 16 * bench.k * height);
  Count(state, seconds, ops, bench.PeakOf(kind), static_cast<int64_t>(passes) * count * stripe_bytes);
}

/// Two or eight tall tiles at a time, as an expert with 16 or 64 tokens has them. Weights in L2. `slabs`:
/// their decoded bytes are kept for all tiles, where the kernel can (integers); wide ones meet all tokens of
/// a tile at a time.
enum class Slabs { kNone, kNarrow, kWide };
void Batch(benchmark::State& state, const Bench& bench, const Named& named, TileKind kind, int num_tiles,
           Slabs slabs) {
  const int64_t blocks = bench.k / named.panel.block;
  const int64_t stripe_bytes = named.panel.stripe_bytes(blocks);
  const int64_t count = std::max<int64_t>(2, (int64_t{384} << 10) / stripe_bytes / 2 * 2);
  TileView views[kBatchTiles];
  void* rows[kBatchTiles * kMaxHeight];
  for (int i = 0; i < num_tiles * kMaxHeight; ++i) {
    rows[i] = bench.tile + i * TileRowBytes(named.kernel, kind, bench.k);
  }
  for (int tile = 0; tile < num_tiles; ++tile) {
    views[tile] = ViewTile(rows[tile * kMaxHeight], named.kernel, kind, bench.k, kMaxHeight);
    views[tile].tall_tile.rows = rows + tile * kMaxHeight;
    views[tile].tall_tile.slab_tiles = slabs == Slabs::kNone ? kNoSlabs : 2;
    views[tile].tall_tile.wide_slabs = slabs == Slabs::kWide;
    views[tile].group_scales = GroupScalesOf(named.panel);
  }
  alignas(64) static float out[2 * kBatchTiles * kMaxHeight * 16];
  const double begin = ThreadSeconds();
  for (auto _ : state) {
    for (int64_t stripe = 0; stripe < count; stripe += 2) {
      bench.table->batch[named.kernel][kind](bench.weights + stripe * stripe_bytes, 2, stripe_bytes, blocks,
                                             views, num_tiles, out);
    }
    benchmark::ClobberMemory();
  }
  const double seconds = ThreadSeconds() - begin;
  const auto passes = static_cast<double>(state.iterations());
  const double ops = passes * 2.0 * static_cast<double>(count * 16 * bench.k * kMaxHeight * num_tiles);
  Count(state, seconds, ops, bench.PeakOf(kind), static_cast<int64_t>(passes) * count * stripe_bytes);
}

/// One expert on the matrix unit: `tokens` tokens and so many stripes that their weights stay in L2. Sums are
/// handed over and left.
void Tile(benchmark::State& state, const Bench& bench, const Named& named, const TileFormat& format,
          bool int8, int64_t tokens) {
  const int64_t blocks = bench.k / named.panel.block;
  const int64_t stripe_bytes = named.panel.stripe_bytes(blocks);
  const int64_t pairs = std::max<int64_t>(2, (int64_t{256} << 10) / stripe_bytes / 2);
  const int64_t row_bytes = int8 ? bench.k : 2 * bench.k;
  auto* values = reinterpret_cast<uint16_t*>(bench.tile);
  for (int64_t i = 0; i < TileRows(tokens) * row_bytes / 2; ++i) {
    values[i] = static_cast<uint16_t>(0x3f80 + i * 7 % 128);  // the unit is faster with zeros in it
  }
  std::vector<float> sides(static_cast<size_t>(TileRows(tokens) * (bench.k / 32 + 1)), 1.0F);
  const Workspace scratch = *Workspace::Allocate(kTileScratchBytes);
  TileJob job{};
  job.weights = bench.weights;
  job.tokens = reinterpret_cast<const uint8_t*>(bench.tile);
  const bool codes = int8 || named.kernel == kWeightE4m3Scaled ||
                     named.kernel == kWeightE4m3Stripe;  // whose scales act on sums
  job.scale = codes ? sides.data() : nullptr;
  job.sum = sides.data();
  job.num_tokens = tokens;
  job.rows = TileRows(tokens);
  TileGemm gemm{};
  gemm.jobs = &job;
  gemm.num_jobs = 1;
  gemm.blocks = blocks;
  gemm.stripe_bytes = stripe_bytes;
  gemm.num_stripes = 2 * pairs;
  gemm.end_pair = pairs;
  gemm.scale_group = codes && format.scale_group > 0 ? 128 : 0;
  gemm.weight_group = 128;
  gemm.group_scales = GroupScalesOf(named.panel);
  gemm.scratch = scratch.Get<uint8_t>(WorkspaceSlot{0, kTileScratchBytes});
  gemm.begin = [](void*, const TileJob*, int64_t) {};
  gemm.finish = [](void*, int64_t, int64_t, float*, float*) {};
  gemm.finish_tokens = 1;
  const double begin = ThreadSeconds();
  for (auto _ : state) {
    format.gemm(&gemm);
    benchmark::ClobberMemory();
  }
  const double seconds = ThreadSeconds() - begin;
  const auto passes = static_cast<double>(state.iterations());
  const double ops = passes * 2.0 * static_cast<double>(tokens * pairs * 32 * bench.k);
  Count(state, seconds, ops, int8 ? bench.amx_int8_peak : bench.amx_bf16_peak,
        static_cast<int64_t>(passes) * 2 * pairs * stripe_bytes);
}

void RegisterTiles(const Bench& bench) {
  const std::pair<const char*, TileWeights> kinds[] = {{"bf16", kExactWeights},
                                                       {"rounded", kRoundedInF16},
                                                       {"rounded_f32", kRoundedInF32},
                                                       {"int8", kInt8Weights}};
  for (const Named& named : kKernels) {
    for (const auto& [kind, weights] : kinds) {
      const TileFormat& format = HostTileKernels(weights).formats[weights][named.kernel];
      for (const int64_t tokens : {16, 32, 64, 128, 256}) {
        if (format.gemm == nullptr) {
          continue;
        }
        const bool int8 = weights == kInt8Weights;
        const std::string name =
            std::string("tile/amx/") + named.name + "/" + kind + "/tokens:" + std::to_string(tokens) + "/l2";
        benchmark::RegisterBenchmark(name.c_str(), [&bench, &named, &format, int8,
                                                    tokens](benchmark::State& state) {
          Tile(state, bench, named, format, int8, tokens);
        })->MinTime(0.2);
      }
    }
  }
}

/// One row of activations to a tile of one token.
void Pack(benchmark::State& state, const Bench& bench, TileKind kind) {
  std::vector<float> values(static_cast<size_t>(bench.k));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(i * 7 % 64) - 31.5F;
  }
  PackArguments arguments{};
  arguments.tile = ViewTile(bench.tile, kWeightNvfp4, kind, bench.k, 1);
  arguments.correction = CorrectionOf(kWeightNvfp4, false);
  arguments.units = bench.k / kPanelUnit;
  arguments.values = values.data();
  for (auto _ : state) {
    bench.table->pack[kind](&arguments);
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * bench.k);
}

/// Tiles of one token to a tile of several.
void Interleave(benchmark::State& state, const Bench& bench, int height) {
  const int32_t* tokens[kMaxHeight];
  auto* base = reinterpret_cast<int32_t*>(bench.tile);
  for (int t = 0; t < kMaxHeight; ++t) {
    tokens[t] = base + t * bench.k;
  }
  for (auto _ : state) {
    bench.table->interleave(tokens, bench.k, height, base + kMaxHeight * bench.k);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * bench.k * height * 4);
}

void Register(const Bench& bench) {
  const std::string isa = bench.table->isa;
  for (const Named& named : kKernels) {
    for (int kind = 0; kind < kNumTileKinds; ++kind) {
      for (int h = 0; h < kNumHeights; ++h) {
        if (bench.table->dot[named.kernel][kind][h] == nullptr) {
          continue;
        }
        for (const bool cold : {false, true}) {
          const std::string name = "dot/" + isa + "/" + named.name + "/" + kTiles[kind] +
                                   "/tokens:" + std::to_string(kHeights[h]) + (cold ? "/memory" : "/l2");
          benchmark::RegisterBenchmark(name.c_str(), [&bench, &named, kind, h,
                                                      cold](benchmark::State& state) {
            Dot(state, bench, named, static_cast<TileKind>(kind), h, cold);
          })->MinTime(0.2);
        }
      }
      if (bench.table->batch[named.kernel][kind] != nullptr) {
        constexpr const char* kSlabs[] = {"/l2", "/l2/once", "/l2/once_wide"};
        const bool integers =
            kind == kTileA16 || kind == kTileA8 || HasGroupScales(static_cast<TileKind>(kind));
        for (int i = 0; i < (integers ? 6 : 2); ++i) {
          const int tiles = i % 2 == 0 ? 2 : 8;
          const auto slabs = static_cast<Slabs>(i / 2);
          const std::string name = "batch/" + isa + "/" + named.name + "/" + kTiles[kind] +
                                   "/tokens:" + std::to_string(tiles * kMaxHeight) + kSlabs[i / 2];
          benchmark::RegisterBenchmark(name.c_str(), [&bench, &named, kind, tiles,
                                                      slabs](benchmark::State& state) {
            Batch(state, bench, named, static_cast<TileKind>(kind), tiles, slabs);
          })->MinTime(0.2);
        }
      }
    }
  }
  for (int kind = 0; kind < kNumTileKinds; ++kind) {
    if (bench.table->pack[kind] != nullptr) {
      benchmark::RegisterBenchmark(
          ("pack/" + isa + "/" + kTiles[kind]).c_str(),
          [&bench, kind](benchmark::State& state) { Pack(state, bench, static_cast<TileKind>(kind)); });
    }
  }
  for (const int height : {2, 4, 8}) {
    benchmark::RegisterBenchmark(
        ("interleave/" + isa + "/tokens:" + std::to_string(height)).c_str(),
        [&bench, height](benchmark::State& state) { Interleave(state, bench, height); });
  }
}

int Main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  static Bench bench;
  Isa level = BestIsa(HostMachine()).value_or(Isa::kAvx2);
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word.starts_with("--isa=") && ParseIsa(word.substr(6))) {
      level = *ParseIsa(word.substr(6));
    } else if (word.starts_with("--k=")) {
      bench.k = std::max<int64_t>(128, std::atol(argv[i] + 4) / 128 * 128);
    } else if (word.starts_with("--ahead=")) {
      bench.ahead = std::max<int64_t>(0, std::atol(argv[i] + 8) / 64 * 64);
    } else if (word.starts_with("--far=")) {
      bench.far = std::max<int64_t>(0, std::atol(argv[i] + 6) / 64 * 64);
    }
  }
  bench.table = FindKernelTable(level);
  if (bench.table == nullptr) {
    return 2;
  }
  bench.memory = *Workspace::Allocate(kBytes + kTileBytes);
  bench.weights = bench.memory.Get<uint8_t>(WorkspaceSlot{0, kBytes});
  bench.tile = bench.memory.Get<char>(WorkspaceSlot{kBytes, kTileBytes});
  for (int64_t i = 0; i < kBytes; ++i) {
    bench.weights[i] = static_cast<uint8_t>(48 + (i * 7 + i / 64) % 16);  // ordinary numbers in every format
  }
  std::memset(bench.tile, 0, static_cast<size_t>(kTileBytes));
  bench.int_peak = VectorPeak(level, "int8", {});
  bench.float_peak = VectorPeak(level, "f32_fma", {});
  bench.bf16_peak = MeasurePeak(ComputeUnit::kBf16Dot, {});
  bench.f16_peak = MeasurePeak(ComputeUnit::kF16Fma, {});
  Register(bench);
  if (HostMachine().Has(Isa::kAmx)) {
    bench.amx_bf16_peak = MeasurePeak(ComputeUnit::kAmxBf16, {});
    bench.amx_int8_peak = MeasurePeak(ComputeUnit::kAmxInt8, {});
    RegisterTiles(bench);
  }
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}

}  // namespace
}  // namespace fusedmoe::bench

int main(int argc, char** argv) {
  return fusedmoe::bench::Main(argc, argv);
}
