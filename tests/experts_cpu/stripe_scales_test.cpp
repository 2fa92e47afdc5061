#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <string_view>
#include <vector>

#include "cpu_layer.hpp"
#include "experts/cpu/cpu_plan.hpp"
#include "kernel_stripes.hpp"
#include "layer/kernel_builder.hpp"
#include "weights/slice.hpp"

/// FP8 in blocks whose scales stand once for a stripe (PanelScale::kStripeF32) beside the same weights with a
/// scale for each row: everything has the same bits.
namespace fusedmoe::cpu {
namespace {

using cpu_test::Layer;
using cpu_test::LayerSpec;
using cpu_test::MakeLayer;

constexpr PanelFormat kStripes{DType::kF8E4M3, PanelScale::kStripeF32, 64};
constexpr PanelFormat kRows{DType::kF8E4M3, PanelScale::kF32, 64};
constexpr int64_t kBeyond = 16 << 10;  // prefetches go further than the stripes

/// The same weights in both formats: any codes, scales from 2^-3 to 2^3 of either sign, a pair of units
/// sharing one.
struct Both {
  std::vector<uint8_t> stripes, rows;
};
Both MakeBoth(int64_t num_stripes, int64_t blocks, std::mt19937& random) {
  Both both;
  both.stripes.resize(static_cast<size_t>(num_stripes * kStripes.stripe_bytes(blocks) + kBeyond));
  both.rows.resize(static_cast<size_t>(num_stripes * kRows.stripe_bytes(blocks) + kBeyond));
  for (int64_t stripe = 0; stripe < num_stripes; ++stripe) {
    uint8_t* header = both.stripes.data() + stripe * kStripes.stripe_bytes(blocks);
    uint8_t* codes = header + kStripes.header_bytes(blocks);
    uint8_t* block = both.rows.data() + stripe * kRows.stripe_bytes(blocks);
    float scale = 0;
    for (int64_t b = 0; b < blocks; ++b, codes += 1024, block += kRows.block_bytes()) {
      if (b % 2 == 0) {
        scale = std::ldexp(1.0F + static_cast<float>(random() & 255) / 256.0F,
                           static_cast<int>(random() % 6) - 3);
        scale = random() % 2 == 0 ? scale : -scale;
      }
      for (int64_t i = 0; i < 1024; ++i) {
        const auto code = static_cast<uint8_t>(random());
        codes[i] = block[i] = (code & 0x7f) == 0x7f ? 0 : code;
      }
      std::memcpy(header + 4 * b, &scale, 4);
      for (int64_t row = 0; row < kPanelRows; ++row) {
        std::memcpy(block + 1024 + 4 * row, &scale, 4);
      }
    }
  }
  return both;
}

/// Short tiles through every kernel of a level, prefetching twice and once, two tiles alternately; tall
/// ones together.
TEST(Kernel_ScalesOfStripes, HaveTheBitsOfScalesOfRows) {
  std::mt19937 random(21);
  int compared = 0;
  for (const std::string& isa : cpu_test::HostIsas()) {
    const KernelTable& table = *FindKernelTable(*ParseIsa(isa));
    for (const TileKind kind : {kTileF32, kTileRaised, kTileBf16, kTileBf16Pair, kTileF16}) {
      if (table.dot[kWeightE4m3Stripe][kind][0] == nullptr) {
        ASSERT_EQ(table.dot[kWeightE4m3Scaled][kind][0], nullptr) << isa << " " << kind;
        continue;
      }
      for (const int64_t blocks : {1, 2, 3, 6, 17, 33}) {
        constexpr int64_t kCount = 3;  // stripes: a pair and one that is alone
        const Both both = MakeBoth(kCount, blocks, random);
        const int64_t k = blocks * kPanelUnit;
        for (int index = 0; index < kNumHeights; ++index) {
          const DotKernel of_rows = table.dot[kWeightE4m3Scaled][kind][index];
          const DotKernel of_stripes = table.dot[kWeightE4m3Stripe][kind][index];
          ASSERT_EQ(of_rows == nullptr, of_stripes == nullptr) << isa << " " << kind << " " << index;
          if (of_rows == nullptr) {
            continue;
          }
          const int height = kHeights[index];
          const int64_t words = TileRowBytes(kWeightE4m3Stripe, kind, k) / 4 * height;
          std::vector<std::vector<float>> memory;
          TileView views[2];
          for (TileView& view : views) {
            memory.emplace_back(static_cast<size_t>(words + 64));
            float* values = memory.back().data();
            view = ViewTile(values, kWeightE4m3Stripe, kind, k, height);
            const int64_t code_words = IsFloatTile(kind) ? k * height : k * height * Planes(kind) / 2;
            for (int64_t i = 0; i < code_words; ++i) {
              const float value = static_cast<float>(random() & 0xffff) / 32768.0F - 1.0F;
              const uint32_t pair = kind == kTileF16 ? 0x38003a00U ^ (random() & 0x80ff80ffU)
                                                     : 0x3f803f00U ^ (random() & 0x807f807fU);
              IsFloatTile(kind) ? void(values[i] = value) : void(std::memcpy(values + i, &pair, 4));
            }
            for (int64_t i = 0; kind != kTileF32 && i < blocks * height; ++i) {
              view.scale[i] = 0.5F + static_cast<float>(random() & 255) / 256.0F;
            }
          }
          std::vector<float> once;
          for (const bool twice : {false, true}) {
            for (int i = 0; i < 2; ++i) {
              views[i].short_tile.prefetch_far = twice ? 9216 : 0;
              views[i].short_tile.next_stripe_tile = &views[1 - i];
            }
            std::vector<float> out[2];
            for (std::vector<float>& values : out) {
              values.assign(static_cast<size_t>(kCount * height * kPanelRows), -1.0F);
            }
            of_rows(both.rows.data(), kCount, blocks, &views[0], out[0].data());
            of_stripes(both.stripes.data(), kCount, blocks, &views[0], out[1].data());
            ASSERT_EQ(0, std::memcmp(out[0].data(), out[1].data(), out[0].size() * 4))
                << isa << " tile " << kind << " blocks " << blocks << " height " << height;
            ASSERT_TRUE(std::isfinite(out[0][0]));
            once = twice ? once : out[0];
            ASSERT_EQ(0, std::memcmp(out[0].data(), once.data(), once.size() * 4))
                << isa << " tile " << kind << " blocks " << blocks << " height " << height << " twice";
            ++compared;
          }
          if (height == kMaxHeight && table.batch[kWeightE4m3Scaled][kind] != nullptr) {
            views[0].short_tile.next_stripe_tile = views[1].short_tile.next_stripe_tile = nullptr;
            std::vector<float> out[2];
            for (std::vector<float>& values : out) {
              values.assign(static_cast<size_t>(2 * kCount * height * kPanelRows), -1.0F);
            }
            table.batch[kWeightE4m3Scaled][kind](both.rows.data(), kCount, kRows.stripe_bytes(blocks), blocks,
                                                 views, 2, out[0].data());
            table.batch[kWeightE4m3Stripe][kind](both.stripes.data(), kCount, kStripes.stripe_bytes(blocks),
                                                 blocks, views, 2, out[1].data());
            ASSERT_EQ(0, std::memcmp(out[0].data(), out[1].data(), out[0].size() * 4)) << isa << " " << kind;
          }
        }
      }
    }
  }
  EXPECT_GT(compared, 0);
}

/// Sums of a job, as the tiles hand them over: [stripe][token][row].
struct Sums {
  std::map<int64_t, std::vector<float>> of;
  int64_t stripe = 0;
};

/// Tiles of this host, or the emulated ones: rounded weights, and sums that are scaled after 64 and 128 k.
TEST(Tiles_ScalesOfStripes, HaveTheBitsOfScalesOfRows) {
  if (FindTileFormat(kWeightE4m3Stripe, kExactWeights) == nullptr) {
    GTEST_SKIP() << "no tiles in this build";
  }
  std::mt19937 random(22);
  const Workspace scratch = *Workspace::Allocate(kTileScratchBytes);
  const TileKernels& kernels = HostTileKernels();
  for (const int64_t blocks : {1, 2, 5, 6, 12, 17}) {
    for (const int64_t tokens : {3, 16, 33, 70}) {
      constexpr int64_t kCount = 5;  // stripes: two pairs and one that has no partner
      const Both both = MakeBoth(kCount, blocks, random);
      const int64_t k = blocks * kPanelUnit, rows = TileRows(tokens);
      const Workspace memory = *Workspace::Allocate(rows * 2 * k);
      auto* values = memory.Get<uint16_t>(WorkspaceSlot{0, rows * 2 * k});
      std::vector<float> scales(static_cast<size_t>(rows * blocks));
      for (float& scale : scales) {
        scale = 0.5F + static_cast<float>(random() & 255) / 256.0F;
      }
      for (int64_t i = 0; i < rows * k; ++i) {
        values[i] = static_cast<uint16_t>(0x3f80 ^ (random() & 0x807f));
      }
      struct Way {
        bool rounded;
        int64_t scale_group, weight_group;
      };
      for (const Way& way : {Way{true, 0, 64}, Way{true, 0, 128}, Way{false, 64, 64}, Way{false, 128, 64},
                             Way{false, 128, 128}, Way{false, 0, 64}}) {
        Sums sums[2];
        for (int i = 0; i < 2; ++i) {
          TileJob job{};
          job.weights = i == 0 ? both.rows.data() : both.stripes.data();
          job.tokens = reinterpret_cast<const uint8_t*>(values);
          job.scale = way.rounded || way.scale_group == 0 ? nullptr : scales.data();
          job.num_tokens = tokens;
          job.rows = rows;
          TileGemm gemm{};
          gemm.jobs = &job;
          gemm.num_jobs = 1;
          gemm.blocks = blocks;
          gemm.stripe_bytes = (i == 0 ? kRows : kStripes).stripe_bytes(blocks);
          gemm.num_stripes = kCount;
          gemm.end_pair = 3;
          gemm.scale_group = way.rounded ? 0 : way.scale_group;
          gemm.weight_group = way.weight_group;
          gemm.scratch = scratch.Get<uint8_t>(WorkspaceSlot{0, kTileScratchBytes});
          gemm.begin = [](void* context, const TileJob*, int64_t first) {
            static_cast<Sums*>(context)->stripe = first;
          };
          gemm.finish = [](void* context, int64_t first, int64_t count, float* even, float* odd) {
            auto& all = *static_cast<Sums*>(context);
            for (int64_t t = 0; t < count; ++t) {
              std::vector<float>& out = all.of[all.stripe * 1000 + first + t];
              out.insert(out.end(), even + t * 16, even + t * 16 + 16);
              out.insert(out.end(), odd + t * 16, odd + t * 16 + 16);
            }
          };
          gemm.begin_context = gemm.finish_context = &sums[i];
          gemm.finish_tokens = 1;
          kernels
              .formats[way.rounded ? kRoundedInF16 : kExactWeights]
                      [i == 0 ? kWeightE4m3Scaled : kWeightE4m3Stripe]
              .gemm(&gemm);
        }
        ASSERT_EQ(sums[0].of.size(), static_cast<size_t>(3 * tokens));
        for (const auto& [at, expected] : sums[0].of) {
          const std::vector<float>& actual = sums[1].of[at];
          ASSERT_EQ(actual.size(), expected.size());
          ASSERT_EQ(0, std::memcmp(actual.data(), expected.data(), expected.size() * 4))
              << "blocks " << blocks << " tokens " << tokens << " rounded " << way.rounded << " groups "
              << way.scale_group << " " << way.weight_group << " at " << at;
        }
      }
    }
  }
}

/// Whole layers at every level, emulated where this machine has it not.
TEST(Layer_ScalesOfStripes, HaveTheBitsOfScalesOfRows) {
  std::vector<std::string> isas = cpu_test::HostIsas();
  if (cpu_test::IsBuilt(Isa::kAmx) && std::find(isas.begin(), isas.end(), "amx") == isas.end()) {
    isas.emplace_back("amx");
  }
  for (const std::string& isa : isas) {
    const Machine machine = isa == "amx" ? cpu_test::MachineWithTiles() : cpu_test::MachineFor(isa);
    for (const char* scheme : {"fp8_w8a16:block128", "fp8_w8a8:block128"}) {
      for (const ActivationMode mode : {ActivationMode::kAsCheckpoint, ActivationMode::kA8}) {
        for (const char* name : {"latency", "throughput"}) {
          const bool sums_in_f16 = isa == "avx512_fp16";
          const bool rows_in_bf16 = isa == "avx512_bf16" && std::string_view(scheme) == "fp8_w8a16:block128";
          if (mode == ActivationMode::kA8 && !sums_in_f16 && !rows_in_bf16) {
            continue;  // has no meaning there
          }
          LayerSpec spec{.scheme = scheme, .hidden = 1160, .intermediate = 200, .experts = 2};
          spec.mode = mode;
          Layer layer = MakeLayer(spec);
          layer.problem.isa = isa;
          layer.problem.mode = name;
          const cpu_test::Runner stripes = cpu_test::MakeRunnerOn(machine, layer);
          layer.problem.weights.cuts_stripes = true;
          const cpu_test::Runner rows = cpu_test::MakeRunnerOn(machine, layer);
          ASSERT_NE(stripes.weights->layout_key, rows.weights->layout_key);
          for (const int64_t tokens : {1, 4, 40}) {
            const cpu_test::Batch batch = cpu_test::MakeBatch(spec, tokens, 3);
            EXPECT_EQ(RunBatch(layer, stripes, batch), RunBatch(layer, rows, batch))
                << isa << " " << scheme << " " << name << " tokens " << tokens;
          }
        }
      }
    }
  }
}

/// Rows of an expert from some row of larger matrices on, as a rank has it, or up behind gate.
CanonicalExpert RowsFrom(const CanonicalExpert& expert, int64_t first, int64_t rows) {
  CanonicalExpert cut = expert;
  cut.gate = *SliceMatrix(expert.gate, first, rows, 0, expert.gate.cols);
  cut.up = *SliceMatrix(expert.up, first, rows, 0, expert.up.cols);
  cut.down = *SliceMatrix(expert.down, 0, expert.down.rows, first, rows);
  return cut;
}

/// An expert whose blocks end inside stripes does not fit into a layer that was planned without, and is
/// refused by name; one that needs less fits.
TEST(Weights_ThatCutStripes, AreRefusedWhereNobodySaidSo) {
  const Layer whole = MakeLayer({.scheme = "fp8_w8a16:block128", .hidden = 128, .intermediate = 256});
  Layer layer = MakeLayer({.scheme = "fp8_w8a16:block128", .hidden = 128, .intermediate = 120});
  for (const int64_t first : {64, 72}) {
    for (const bool said : {false, true}) {
      layer.problem.weights.cuts_stripes = said;
      layer.experts.clear();
      for (const CanonicalExpert& expert : whole.experts) {
        layer.experts.push_back(RowsFrom(expert, first, 120));
      }
      const Result<MoeProblem> problem = MakeProblem(layer.problem.config, layer.Source(), LayerOptions{});
      ASSERT_TRUE(problem.ok()) << problem.status().ToString();
      EXPECT_EQ(problem->weights.cuts_stripes, first == 72) << "what a layer of such slices is planned for";
      layer.problem.config.parallel.tp_size = 2;  // down begins inside a group of scales
      layer.problem.config.parallel.tp_rank = 1;
      const Result<PreparedWeights> prepared =
          kCpuFusedBackend.prepare(layer.problem, HostMachine(), layer.Source(), {});
      if (first == 64 || said) {
        ASSERT_TRUE(prepared.ok()) << prepared.status().ToString();
        EXPECT_EQ(prepared->layout_key.find("16x64") == std::string::npos, said);
      } else {
        ASSERT_FALSE(prepared.ok());
        EXPECT_NE(
            prepared.status().ToString().find("gate has format n16k64(F8_E4M3, F32 per 64); the plan was "
                                              "made for n16k64(F8_E4M3, F32 per 16x64)"),
            std::string::npos)
            << prepared.status().ToString();
      }
    }
  }
}

}  // namespace
}  // namespace fusedmoe::cpu
