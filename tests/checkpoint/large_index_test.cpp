// Headers of the size of the largest models: 276,000 tensors in 61 shards, data in holes of sparse files.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include <sys/resource.h>

#include "checkpoint/raw_checkpoint.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;

constexpr int kLayers = 60, kManyExperts = 384;

// One layer in ModelOpt NVFP4: four tensors for each of three projections of each expert.
int64_t WriteShard(const TemporaryDirectory& folder, const std::string& file, int layer,
                   std::string* weight_map) {
  struct Role {
    const char* suffix;
    const char* dtype;
    const char* shape;
    int64_t bytes;
  };
  constexpr Role kRoles[] = {{"weight", "U8", "[2048,3584]", 2048 * 3584},
                             {"weight_scale", "F8_E4M3", "[2048,448]", 2048 * 448},
                             {"weight_scale_2", "F32", "[]", 4},
                             {"input_scale", "F32", "[]", 4}};
  std::string header = "{";
  int64_t offset = 0, count = 0;
  char entry[256];
  for (int e = 0; e < kManyExperts; ++e) {
    for (const char* projection : {"gate_proj", "up_proj", "down_proj"}) {
      for (const Role& role : kRoles) {
        std::snprintf(entry, sizeof(entry),
                      "%s\"model.layers.%d.mlp.experts.%d.%s.%s\":", count == 0 ? "" : ",", layer, e,
                      projection, role.suffix);
        header += entry;
        weight_map->append(weight_map->back() == '{' && count == 0 ? entry
                           : count == 0                            ? std::string(",") + entry
                                                                   : std::string(entry));
        weight_map->append("\"" + file + "\"");
        std::snprintf(entry, sizeof(entry), "{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%lld,%lld]}",
                      role.dtype, role.shape, static_cast<long long>(offset),
                      static_cast<long long>(offset + role.bytes));
        header += entry;
        offset += role.bytes;
        ++count;
      }
    }
  }
  header += "}";
  folder.Write(file, Container(header, ""));
  std::filesystem::resize_file(folder.path() / file, 8 + header.size() + static_cast<uint64_t>(offset));
  return count;
}

double Seconds(const rusage& usage) {
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

TEST(LargeIndex, QuarterOfAMillionTensors_OpenInTwoSeconds) {
  const TemporaryDirectory folder;
  std::string weight_map = "{";
  int64_t tensors = 0;
  for (int layer = 0; layer < kLayers; ++layer) {
    const std::string file = "model-" + std::to_string(layer) + ".safetensors";
    tensors += WriteShard(folder, file, layer, &weight_map);
  }
  folder.Write("model.safetensors.index.json", "{\"metadata\":{},\"weight_map\":" + weight_map + "}}");
  folder.Write(
      "config.json",
      R"({"model_type":"deepseek_v3","hidden_size":7168,"moe_intermediate_size":2048,"n_routed_experts":384,"num_experts_per_tok":8,)"
      R"("num_hidden_layers":60,"quantization_config":{"quant_method":"modelopt","quant_algo":"NVFP4","group_size":16}})");
  ASSERT_EQ(tensors, 276480);
  constexpr double kBound = 2.0;
  // Processor time, and the best of a few: what else runs on the machine does not count. Whatever machine it
  // was, it needed less than half of the bound.
  double best = 1e9;
  for (int attempt = 0; attempt < 5 && best >= kBound; ++attempt) {
    rusage before{}, after{};
    getrusage(RUSAGE_SELF, &before);
    const auto checkpoint = Checkpoint::Open(folder.path().string());
    getrusage(RUSAGE_SELF, &after);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
    EXPECT_EQ((*checkpoint)->tensors().size(), static_cast<size_t>(tensors));
    EXPECT_EQ((*checkpoint)->moe_layers().size(), static_cast<size_t>(kLayers));
    const double seconds = Seconds(after) - Seconds(before);
    std::printf("[   INFO   ] %.2f s, %ld MB more than before\n", seconds,
                (after.ru_maxrss - before.ru_maxrss) / 1024);
    EXPECT_LT(after.ru_maxrss - before.ru_maxrss, 1L << 20) << "KiB";
    best = std::min(best, seconds);
  }
  RecordProperty("seconds", std::to_string(best));
#if defined(NDEBUG) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && \
    !defined(FMOE_EMULATED)
  EXPECT_LT(best, kBound);
#endif
}

}  // namespace
}  // namespace fusedmoe
