#pragma once

#include <string_view>

namespace fusedmoe::checkpoint {

/// A file that configures the reader of a directory, beside the weights.
struct ConfigFile {
  const char* name;
  /// The quant_method that it stands for where it does not say one itself; "": the model's configuration.
  std::string_view method;
};

inline constexpr const char* kModelConfigFile = "config.json";
inline constexpr const char* kModelOptConfigFile = "hf_quant_config.json";

/// All of them; those with a method are asked in this order, where config.json says nothing of quantization.
inline constexpr ConfigFile kConfigFiles[] = {{kModelConfigFile, ""},
                                              {kModelOptConfigFile, "modelopt"},
                                              {"quantize_config.json", "gptq"},
                                              {"quant_config.json", "awq"}};

}  // namespace fusedmoe::checkpoint
