// Damaged safetensors files and indexes: each is refused with the expected code, and the error names the
// file.
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>

#include <fusedmoe/safetensors.hpp>

#include "checkpoint/raw_checkpoint.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;
namespace fs = std::filesystem;

const std::string kTensor = "model.layers.0.mlp.experts.0.up_proj.weight";

// Reads one file of these bytes both ways; every way must refuse it and name the file.
void ExpectBadFile(const std::string& what, const std::string& bytes, const std::string& tensor = "") {
  SCOPED_TRACE(what);
  CountMalformed();
  const TemporaryDirectory folder;
  folder.Write("model.safetensors", bytes);
  const auto whole = ReadSafetensors((folder.path() / "model.safetensors").string());
  ASSERT_FALSE(whole.ok());
  EXPECT_EQ(whole.status().code(), StatusCode::kBadInput) << whole.status().ToString();
  EXPECT_NE(whole.status().file().find("model.safetensors"), std::string::npos);
  if (!tensor.empty()) {
    EXPECT_EQ(whole.status().tensor(), tensor) << whole.status().ToString();
  }
  folder.Write("config.json", TinyModel("bf16").config.dump());
  for (const IoMode io : {IoMode::kPread, IoMode::kMmap}) {
    const Status status = LoadEverything(folder.path(), {.io = io});
    EXPECT_EQ(status.code(), StatusCode::kBadInput) << status.ToString();
  }
}

TEST(MalformedContainer, Lengths_AreRefused) {
  const std::string good = Safetensors(TinyModel("bf16").tensors);
  ExpectBadFile("empty file", "");
  ExpectBadFile("seven bytes", good.substr(0, 7));
  ExpectBadFile("length alone", good.substr(0, 8));
  ExpectBadFile("length 1 and 0xff", std::string("\1\0\0\0\0\0\0\0\xff", 9));
  ExpectBadFile("length 1 and a brace", std::string("\1\0\0\0\0\0\0\0{", 9));
  ExpectBadFile("length of 2^64 - 2^40 + 60", std::string("\x3c\0\0\0\0\xff\xff\xff{}", 10));
  ExpectBadFile("all bits of the length set", std::string(8, '\xff') + "{}");
  ExpectBadFile("length beyond 100 MB", std::string("\1\xe1\xf5\5\0\0\0\0{}", 10));
  ExpectBadFile("trailing bytes", good + "x");
  ExpectBadFile("two bytes short", good.substr(0, good.size() - 2));
}

// What a clone without Git LFS leaves in the place of large files.
TEST(MalformedContainer, PointerOfGitLfs_IsNamed) {
  const TemporaryDirectory folder;
  folder.Write("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n");
  const auto whole = ReadSafetensors((folder.path() / "model.safetensors").string());
  ASSERT_FALSE(whole.ok());
  EXPECT_EQ(whole.status().code(), StatusCode::kBadInput);
  EXPECT_NE(whole.status().ToString().find("Git LFS"), std::string::npos) << whole.status().ToString();
}

TEST(MalformedContainer, TruncationAnywhere_IsRefused) {
  const std::string good = Safetensors(TinyModel("modelopt_nvfp4").tensors);
  for (size_t size = 0; size < good.size(); size += size < 4096 ? 64 : 1021) {
    ExpectBadFile("cut at byte " + std::to_string(size), good.substr(0, size));
  }
}

struct Lie {
  std::string what;
  std::string entry;  // of kTensor
};

TEST(MalformedContainer, LyingEntries_AreRefusedByName) {
  const std::vector<Lie> lies = {
      {"no dtype", R"({"shape":[2],"data_offsets":[0,8]})"},
      {"no shape", R"({"dtype":"F32","data_offsets":[0,8]})"},
      {"no offsets", R"({"dtype":"F32","shape":[2]})"},
      {"dtype a number", R"({"dtype":7,"shape":[2],"data_offsets":[0,8]})"},
      {"unknown dtype", R"({"dtype":"F7","shape":[2],"data_offsets":[0,8]})"},
      {"our own dtype", R"({"dtype":"U4","shape":[16],"data_offsets":[0,8]})"},
      {"lower case dtype", R"({"dtype":"f32","shape":[2],"data_offsets":[0,8]})"},
      {"shape a number", R"({"dtype":"F32","shape":2,"data_offsets":[0,8]})"},
      {"negative dimension", R"({"dtype":"F32","shape":[-2],"data_offsets":[0,8]})"},
      {"fractional dimension", R"({"dtype":"F32","shape":[2.0],"data_offsets":[0,8]})"},
      {"dimension a string", R"({"dtype":"F32","shape":["2"],"data_offsets":[0,8]})"},
      {"dimension null", R"({"dtype":"F32","shape":[null],"data_offsets":[0,8]})"},
      {"product overflows", R"({"dtype":"F32","shape":[2,18446744073709551614],"data_offsets":[0,8]})"},
      {"product overflows when bits are counted",
       R"({"dtype":"F32","shape":[2,9223372036854775807],"data_offsets":[0,8]})"},
      {"strides overflow beside a zero",
       R"({"dtype":"F32","shape":[4611686018427387904,0,4611686018427387904],"data_offsets":[0,0]})"},
      {"seventeen dimensions",
       R"({"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,2],"data_offsets":[0,8]})"},
      {"seven dimensions", R"({"dtype":"F32","shape":[1,1,1,1,1,1,2],"data_offsets":[0,8]})"},
      {"half a byte", R"({"dtype":"F4","shape":[15],"data_offsets":[0,8]})"},
      {"rows of half bytes", R"({"dtype":"F4","shape":[16,1],"data_offsets":[0,8]})"},
      {"too few bytes", R"({"dtype":"F32","shape":[2],"data_offsets":[0,4]})"},
      {"too many bytes", R"({"dtype":"F32","shape":[1],"data_offsets":[0,8]})"},
      {"offsets reversed", R"({"dtype":"F32","shape":[2],"data_offsets":[8,0]})"},
      {"negative offset", R"({"dtype":"F32","shape":[2],"data_offsets":[-8,0]})"},
      {"offsets beyond the file", R"({"dtype":"F32","shape":[4],"data_offsets":[0,16]})"},
      {"one offset", R"({"dtype":"F32","shape":[2],"data_offsets":[8]})"},
      {"three offsets", R"({"dtype":"F32","shape":[2],"data_offsets":[0,8,8]})"},
      {"offsets as strings", R"({"dtype":"F32","shape":[2],"data_offsets":["0","8"]})"},
      {"fractional offsets", R"({"dtype":"F32","shape":[2],"data_offsets":[0,8e0]})"},
      {"a hole in front", R"({"dtype":"F32","shape":[1],"data_offsets":[4,8]})"},
      {"dtype twice", R"({"dtype":"F32","dtype":"I32","shape":[2],"data_offsets":[0,8]})"},
      {"shape twice", R"({"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]})"},
      {"an array for an entry", R"([1,2,3])"},
      {"null for an entry", R"(null)"},
  };
  for (const Lie& lie : lies) {
    ExpectBadFile(lie.what, Container("{\"" + kTensor + "\":" + lie.entry + "}", std::string(8, '\0')),
                  kTensor);
  }
}

TEST(MalformedContainer, EveryNumberAtItsLimits_IsRefusedOrHarmless) {
  const std::vector<std::string> limits = {
      "0", "1", "2147483647", "2147483648", "4294967296", "9223372036854775807", "18446744073709551615"};
  for (const std::string& value : limits) {
    const std::string quoted = "{\"" + kTensor + "\":{\"dtype\":\"F32\",\"shape\":";
    ExpectBadFile("dimension " + value,
                  Container(quoted + "[" + value + ",3],\"data_offsets\":[0,8]}}", std::string(8, '\0')),
                  kTensor);
    ExpectBadFile("begin " + value,
                  Container(quoted + "[3],\"data_offsets\":[" + value + ",8]}}", std::string(8, '\0')),
                  kTensor);
    ExpectBadFile("end " + value,
                  Container(quoted + "[3],\"data_offsets\":[0," + value + "]}}", std::string(8, '\0')),
                  kTensor);
  }
}

TEST(MalformedContainer, Headers_AreRefused) {
  const std::string entry = R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  const std::string second = R"({"dtype":"F32","shape":[2],"data_offsets":[8,16]})";
  const std::string data(8, '\0');
  ExpectBadFile("an array", Container("[]", ""));
  ExpectBadFile("not UTF-8", Container("{\"\xc3\x28\":" + entry + "}", data));
  ExpectBadFile("an overlong UTF-8 form", Container("{\"\xc0\xaf\":" + entry + "}", data));
  ExpectBadFile("half a surrogate", Container("{\"\\ud800\":" + entry + "}", data));
  ExpectBadFile("single quotes", Container("{'a':" + entry + "}", data));
  ExpectBadFile("a comma too many", Container("{\"a\":" + entry + ",}", data));
  ExpectBadFile("text behind the header", Container("{\"a\":" + entry + "} x", data));
  ExpectBadFile("no end", Container("{\"a\":" + entry, data));
  ExpectBadFile("duplicate name", Container("{\"a\":" + entry + ",\"a\":" + second + "}", data + data), "a");
  ExpectBadFile("duplicate name by an escape",
                Container("{\"a\":" + entry + ",\"\\u0061\":" + second + "}", data + data), "a");
  ExpectBadFile(
      "overlap",
      Container("{\"a\":" + entry + ",\"b\":" + R"({"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
                data + "1234"),
      "b");
  ExpectBadFile("the same place twice", Container("{\"a\":" + entry + ",\"b\":" + entry + "}", data), "b");
  ExpectBadFile(
      "a hole",
      Container("{\"a\":" + entry + ",\"b\":" + R"({"dtype":"F32","shape":[1],"data_offsets":[12,16]}})",
                data + data),
      "b");
  ExpectBadFile("an empty name", Container("{\"\":" + entry + "}", data));
  ExpectBadFile("NUL in a name", Container("{\"a\\u0000b\":" + entry + "}", data));
  ExpectBadFile("a line break in a name", Container("{\"a\\nb\":" + entry + "}", data));
  ExpectBadFile("a raw control character", Container("{\"a\nb\":" + entry + "}", data));
  ExpectBadFile("a name of 5000 bytes",
                Container("{\"" + std::string(5000, 'a') + "\":" + entry + "}", data));
  ExpectBadFile("metadata a string", Container("{\"__metadata__\":\"x\"}", ""));
  ExpectBadFile("metadata with a number", Container("{\"__metadata__\":{\"a\":1}}", ""));
  ExpectBadFile("metadata with an object", Container("{\"__metadata__\":{\"a\":{}}}", ""));
  ExpectBadFile("metadata twice", Container("{\"__metadata__\":{},\"__metadata__\":{}}", ""));
  ExpectBadFile("a metadata key twice", Container(R"({"__metadata__":{"a":"1","a":"2"}})", ""));
  ExpectBadFile("nested beyond reason", Container("{\"a\":{\"x\":" + std::string(100000, '[') + "}}", ""),
                "a");
}

TEST(MalformedContainer, UnknownDtype_LeavesOtherTensorsUsable) {
  const TemporaryDirectory folder;
  TinyModel model("bf16");
  model.tensors.push_back(Bytes("vision.codes", "F7_NEW", {3}, 1, 0));
  model.WriteTo(folder);
  EXPECT_TRUE(LoadEverything(folder.path()).ok()) << LoadEverything(folder.path()).ToString();
  const auto checkpoint = Checkpoint::Open(folder.path().string());
  ASSERT_TRUE(checkpoint.ok());
  const auto loaded = (*checkpoint)->Load("vision.codes");
  ASSERT_FALSE(loaded.ok());
  EXPECT_NE(loaded.status().message().find("F7_NEW"), std::string::npos);
}

TEST(MalformedContainer, OddButLegalFiles_AreRead) {
  const std::string data(8, '\1');
  for (
      const std::string& header : std::vector<std::string>{
          R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}      )",
          R"(  {"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
          R"({"a":{"dtype":"I64","shape":[],"data_offsets":[0,8]}})",
          R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"z":{"dtype":"F32","shape":[2,0],"data_offsets":[8,8]}})",
          R"({"a":{"dtype":"F4","shape":[16],"data_offsets":[0,8],"future":{"x":[1,{}]}},"__metadata__":{"format":"pt"}})",
          R"({"__metadata__":null,"a":{"dtype":"F4","shape":[16],"data_offsets":[0,8]}})"}) {
    const TemporaryDirectory folder;
    folder.Write("x.safetensors", Container(header, data));
    const auto file = ReadSafetensors((folder.path() / "x.safetensors").string());
    ASSERT_TRUE(file.ok()) << header << "\n" << file.status().ToString();
    EXPECT_NE(file->Find("a"), nullptr);
  }
}

// A sharded checkpoint whose index `change` damages.
Status LoadSharded(const std::function<void(nlohmann::ordered_json&, const TemporaryDirectory&)>& change,
                   bool allow_partial = false) {
  const TemporaryDirectory folder;
  const TinyModel model("bf16");
  folder.Write("config.json", model.config.dump());
  const auto middle = model.tensors.begin() + 3;
  folder.Write("model-00001-of-00002.safetensors", Safetensors({model.tensors.begin(), middle}));
  folder.Write("model-00002-of-00002.safetensors", Safetensors({middle, model.tensors.end()}));
  nlohmann::ordered_json index = {{"metadata", {{"total_size", 1}}}};
  for (auto it = model.tensors.begin(); it != model.tensors.end(); ++it) {
    index["weight_map"][it->name] =
        it < middle ? "model-00001-of-00002.safetensors" : "model-00002-of-00002.safetensors";
  }
  change(index, folder);
  if (!index.is_null()) {
    folder.Write("model.safetensors.index.json", index.dump());
  }
  return LoadEverything(folder.path(), {.allow_partial = allow_partial});
}

TEST(MalformedIndex, IsRefusedAndNamed) {
  EXPECT_TRUE(LoadSharded([](auto&, auto&) {}).ok());
  const TemporaryDirectory outside;
  const std::string last = "model.layers.0.mlp.experts.1.down_proj.weight";
  struct Case {
    std::string what;
    std::function<void(nlohmann::ordered_json&, const TemporaryDirectory&)> change;
    bool names_tensor = false;
  };
  const auto redirect = [&](std::string value) {
    return [value, last](nlohmann::ordered_json& index, const TemporaryDirectory&) {
      index["weight_map"][last] = value;
    };
  };
  const std::vector<Case> cases = {
      {"no weight_map", [](auto& index, auto&) { index.erase("weight_map"); }},
      {"weight_map a list",
       [](auto& index, auto&) {
         index["weight_map"] = {1, 2};
       }},
      {"weight_map null", [](auto& index, auto&) { index["weight_map"] = nullptr; }},
      {"file a number", [&](auto& index, auto&) { index["weight_map"][last] = 7; }, true},
      {"file null", [&](auto& index, auto&) { index["weight_map"][last] = nullptr; }, true},
      {"the index is a list", [](auto& index, auto&) { index = {1}; }},
      {"a tensor that no shard holds",
       [](auto& index, auto&) { index["weight_map"]["model.extra"] = "model-00001-of-00002.safetensors"; },
       true},
      {"a tensor that the index lacks", [&](auto& index, auto&) { index["weight_map"].erase(last); }, true},
      {"the wrong shard", redirect("model-00001-of-00002.safetensors"), true},
      {"a shard that is missing", redirect("model-00003-of-00003.safetensors")},
      {"no safetensors file", redirect("pytorch_model.bin")},
      {"an absolute path", redirect("/etc/model.safetensors")},
      {"a path upwards", redirect("../model.safetensors")},
      {"a path that goes up later", redirect("a/../../model.safetensors")},
      {"an empty path", redirect("")},
      {"NUL in a path", redirect(std::string("a\0.safetensors", 14))},
      {"a folder",
       [&](auto& index, auto& folder) {
         fs::create_directory(folder.path() / "folder.safetensors");
         index["weight_map"][last] = "folder.safetensors";
       }},
      {"a link that leaves the folder",
       [&](auto& index, auto& folder) {
         const fs::path target = outside.Write("a.safetensors", "x");
         fs::create_symlink(fs::relative(target, folder.path()), folder.path() / "link.safetensors");
         index["weight_map"][last] = "link.safetensors";
       }},
      {"text that is no JSON",
       [](auto& index, auto& folder) {
         folder.Write("model.safetensors.index.json", "{\"weight_map\": {");
         index = nullptr;
       }},
      {"a tensor twice",
       [](auto& index, auto& folder) {
         folder.Write(
             "model.safetensors.index.json",
             R"({"weight_map":{"a":"model-00001-of-00002.safetensors","a":"model-00002-of-00002.safetensors"}})");
         index = nullptr;
       },
       true},
      {"weight_map twice",
       [](auto& index, auto& folder) {
         folder.Write("model.safetensors.index.json", R"({"weight_map":{},"weight_map":{}})");
         index = nullptr;
       }},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(one.what);
    CountMalformed();
    const Status status = LoadSharded(one.change);
    EXPECT_EQ(status.code(), StatusCode::kBadInput) << status.ToString();
    EXPECT_FALSE(status.file().empty());
    if (one.names_tensor) {
      EXPECT_FALSE(status.tensor().empty()) << status.ToString();
    }
  }
}

// Not that a file name is missing, or an object: the text ends.
TEST(MalformedIndex, ThatIsTruncated_SaysSo) {
  for (const char* text :
       {R"({"weight_map": )", R"({"weight_map": {"a": )", R"({"weight_map": {"a": "b.safe)"}) {
    const Status status = LoadSharded([&](auto& index, auto& folder) {
      folder.Write("model.safetensors.index.json", text);
      index = nullptr;
    });
    EXPECT_EQ(status.code(), StatusCode::kBadInput);
    EXPECT_NE(status.message().find("the text ends"), std::string::npos) << status.ToString();
  }
}

// Valid JSON that a header must not hold is not called invalid.
TEST(MalformedContainer, ValuesOfAHeader_AreNotBlamedOnJson) {
  for (const char* entry : {R"("shape":[-64],"data_offsets":[0,4])", R"("shape":["x"],"data_offsets":[0,4])",
                            R"("shape":4,"data_offsets":[0,4])", R"("shape":[1],"data_offsets":{})"}) {
    const TemporaryDirectory folder;
    folder.Write("config.json", TinyModel("bf16").config.dump());
    folder.Write("model.safetensors",
                 Container(R"({"a":{"dtype":"F32",)" + std::string(entry) + "}}", "1234"));
    const Status status = LoadEverything(folder.path());
    EXPECT_EQ(status.code(), StatusCode::kBadInput);
    EXPECT_EQ(status.tensor(), "a") << status.ToString();
    EXPECT_EQ(status.message().find("JSON"), std::string::npos) << status.ToString();
    EXPECT_NE(status.message().find("at byte"), std::string::npos) << status.ToString();
  }
}

TEST(MalformedIndex, AllowPartial_GoesOnWithoutTheMissing) {
  const auto extra = [](nlohmann::ordered_json& index, const TemporaryDirectory&) {
    index["weight_map"]["model.extra"] = "model-00009-of-00009.safetensors";
  };
  EXPECT_EQ(LoadSharded(extra).code(), StatusCode::kBadInput);
  EXPECT_TRUE(LoadSharded(extra, true).ok());
}

TEST(MalformedContainer, WeightsInAnotherForm_AreNamed) {
  const TemporaryDirectory folder;
  folder.Write("config.json", TinyModel("bf16").config.dump());
  EXPECT_EQ(LoadEverything(folder.path()).code(), StatusCode::kBadInput) << "no weights at all";
  folder.Write("training_args.bin", "");
  folder.Write("pytorch_model-00002-of-00002.bin", "");
  folder.Write("pytorch_model-00001-of-00002.bin", "");
  const Status status = LoadEverything(folder.path());
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_NE(status.message().find("'pytorch_model-00001-of-00002.bin'"), std::string::npos)
      << status.ToString();
}

TEST(MalformedIndex, HuggingFaceCacheLinks_AreFollowed) {
  const TemporaryDirectory repository;
  const fs::path blobs = repository.path() / "blobs", snapshot = repository.path() / "snapshots" / "abc";
  fs::create_directories(blobs);
  fs::create_directories(snapshot);
  const TinyModel model("bf16");
  repository.Write("blobs/1", model.config.dump());
  repository.Write("blobs/2", Safetensors(model.tensors));
  fs::create_symlink("../../blobs/1", snapshot / "config.json");
  fs::create_symlink("../../blobs/2", snapshot / "model.safetensors");
  EXPECT_TRUE(LoadEverything(snapshot).ok()) << LoadEverything(snapshot).ToString();
}

TEST(MalformedContainer, FileThatShrinksOrChanges_IsAnErrorInEveryMode) {
  for (const IoMode io : {IoMode::kAuto, IoMode::kPread, IoMode::kMmap}) {
    for (const bool shrink : {true, false}) {
      const TemporaryDirectory folder;
      const TinyModel model("bf16");
      model.WriteTo(folder);
      const auto checkpoint = Checkpoint::Open(folder.path().string(), {.io = io});
      ASSERT_TRUE(checkpoint.ok());
      const fs::path file = folder.path() / "model.safetensors";
      if (shrink) {
        fs::resize_file(file, fs::file_size(file) / 2);
      } else {
        fs::remove(file);
        folder.Write("model.safetensors", Safetensors(model.tensors));
        fs::last_write_time(file, fs::file_time_type::clock::now() + std::chrono::seconds(5));
      }
      const auto source = (*checkpoint)->Experts(0);
      ASSERT_TRUE(source.ok());
      const auto expert = source->load(1);
      ASSERT_FALSE(expert.ok());
      EXPECT_EQ(expert.status().code(), StatusCode::kBadInput);
      EXPECT_FALSE(expert.status().tensor().empty()) << expert.status().ToString();
      EXPECT_NE(expert.status().file().find("model.safetensors"), std::string::npos);
    }
  }
}

}  // namespace
}  // namespace fusedmoe
