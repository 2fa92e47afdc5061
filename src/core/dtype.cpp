#include <fusedmoe/dtype.hpp>

namespace fusedmoe {

std::string_view DTypeName(DType dtype) {
  switch (dtype) {
#define FMOE_DTYPE_NAME(id, name, bits, what) \
  case DType::id:                             \
    return name;
    FMOE_DTYPE_TABLE(FMOE_DTYPE_NAME)
#undef FMOE_DTYPE_NAME
  }
  return "?";
}

std::optional<DType> ParseDType(std::string_view name) {
#define FMOE_DTYPE_PARSE(id, text, bits, what) \
  if (name == text) {                          \
    return DType::id;                          \
  }
  FMOE_DTYPE_TABLE(FMOE_DTYPE_PARSE)
#undef FMOE_DTYPE_PARSE
  return std::nullopt;
}

}  // namespace fusedmoe
