#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <fusedmoe/jobs/tune.hpp>
#include <fusedmoe/quant.hpp>
#include <fusedmoe/version.hpp>

#include "core/checked_math.hpp"
#include "platform/file.hpp"

namespace fusedmoe {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kSchemaVersion = 1;
constexpr double kMostNanoseconds = 1e12;
constexpr size_t kMostRows = 4096;
constexpr int kMostThreads = 65536;

/// Takes the members of one object; the first mistake stays.
class Reader {
 public:
  Reader(const Json& object, std::string path) : object_(object), path_(std::move(path)) {
    if (!object.is_object()) {
      status_ =
          Status::BadInput(path_.empty() ? "not a JSON object" : fmt::format("'{}' is not an object", path_));
    }
  }

  const Json* Take(const char* key, bool required = true) {
    if (!status_.ok()) {
      return nullptr;
    }
    const auto found = object_.find(key);
    if (found == object_.end()) {
      if (required) {
        status_ = Status::BadInput(fmt::format("field '{}' is missing", Name(key)));
      }
      return nullptr;
    }
    return &*found;
  }

  void Text(const char* key, std::string& value, bool required = true) {
    if (const Json* field = Take(key, required); field != nullptr) {
      field->is_string() ? void(value = field->get<std::string>()) : Refuse(key, *field, "a string");
    }
  }
  void Flag(const char* key, bool& value) {
    if (const Json* field = Take(key); field != nullptr) {
      field->is_boolean() ? void(value = field->get<bool>()) : Refuse(key, *field, "true or false");
    }
  }
  void Number(const char* key, double& value) {
    const Json* field = Take(key);
    if (field == nullptr) {
      return;
    }
    if (field->is_number()) {
      value = field->get<double>();
    }
    if (!field->is_number() || !(value >= 0) || value > kMostNanoseconds) {
      Refuse(key, *field, fmt::format("a number from 0 to {:g}", kMostNanoseconds));
    }
  }
  void Integer(const char* key, int& value, int low, int high) {
    const Json* field = Take(key);
    if (field == nullptr) {
      return;
    }
    const auto number = field->is_number() ? ExactInteger(field->get<double>()) : std::nullopt;
    if (!number || *number < low || *number > high) {
      Refuse(key, *field,
             low == high ? fmt::format("{}", low) : fmt::format("an integer from {} to {}", low, high));
      return;
    }
    value = static_cast<int>(*number);
  }
  void Path(const char* key, CpuPathCost& cost, double& misfit) {
    const Json* field = Take(key);
    if (field == nullptr) {
      return;
    }
    Reader path(*field, Name(key));
    path.Number("fixed_ns", cost.fixed_ns);
    path.Number("read_ns", cost.read_ns);
    path.Number("decode_ns", cost.decode_ns);
    path.Number("row_ns", cost.row_ns);
    path.Number("token_ns", cost.token_ns);
    double own = 0;
    path.Number("misfit", own);
    misfit = std::max(misfit, own);
    if (status_.ok()) {
      status_ = path.status();
    }
  }

  void Refuse(const char* key, const Json& field, const std::string& wanted) {
    status_ =
        Status::BadInput(fmt::format("field '{}' is {}; it must be {}", Name(key),
                                     field.dump(-1, ' ', false, Json::error_handler_t::replace), wanted));
  }
  const Status& status() const { return status_; }

 private:
  std::string Name(const char* key) const { return path_.empty() ? key : path_ + "." + key; }

  const Json& object_;
  std::string path_;
  Status status_;
};

Json PathJson(const CpuPathCost& cost, double misfit) {
  return {{"fixed_ns", cost.fixed_ns}, {"read_ns", cost.read_ns},   {"decode_ns", cost.decode_ns},
          {"row_ns", cost.row_ns},     {"token_ns", cost.token_ns}, {"misfit", misfit}};
}

Result<CpuCostRow> ReadRow(const Json& object, size_t index) {
  CpuCostRow row;
  Reader reader(object, fmt::format("costs[{}]", index));
  reader.Text("scheme", row.scheme);
  reader.Text("isa", row.isa);
  reader.Text("weights", row.weights);
  reader.Text("activations", row.activations);
  reader.Flag("codes", row.codes);
  reader.Path("vectors", row.vectors, row.misfit);
  row.has_tiles = reader.Take("tiles", /*required=*/false) != nullptr;
  if (row.has_tiles) {
    reader.Path("tiles", row.tiles, row.misfit);
  }
  FMOE_RETURN_IF_ERROR(reader.status());
  // With ":a8" it is of int8 activations (RunTune).
  const std::string_view a8 = ":a8";
  const std::string scheme =
      row.scheme.substr(0, row.scheme.size() - (row.scheme.ends_with(a8) ? a8.size() : 0));
  if (!ParseScheme(scheme).ok()) {
    return Status::BadInput(
        fmt::format("field 'costs[{}].scheme' is '{}', which is no scheme", index, row.scheme));
  }
  if (!ParseIsa(row.isa)) {
    return Status::BadInput(
        fmt::format("field 'costs[{}].isa' is '{}', which is no instruction set", index, row.isa));
  }
  return row;
}

}  // namespace

std::string ToJson(const CpuCosts& costs) {
  Json rows = Json::array();
  for (const CpuCostRow& row : costs.rows) {
    Json json = {{"scheme", row.scheme},   {"isa", row.isa},
                 {"weights", row.weights}, {"activations", row.activations},
                 {"codes", row.codes},     {"vectors", PathJson(row.vectors, row.misfit)}};
    if (row.has_tiles) {
      json["tiles"] = PathJson(row.tiles, row.misfit);
    }
    rows.push_back(std::move(json));
  }
  const Json file = {
      {"schema_version", kSchemaVersion}, {"kind", "cpu_costs"},      {"cpu", costs.cpu},
      {"version", costs.version},         {"threads", costs.threads}, {"costs", std::move(rows)}};
  return file.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

Result<CpuCosts> ParseCpuCosts(std::string_view json) {
  const Json object = Json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (object.is_discarded()) {
    return Status::BadInput("not JSON").WithHint("fusedmoe tune --out FILE writes such files");
  }
  CpuCosts costs;
  Reader reader(object, "");
  std::string kind;
  int version = 0;
  reader.Integer("schema_version", version, kSchemaVersion, kSchemaVersion);
  reader.Text("kind", kind);
  reader.Text("cpu", costs.cpu);
  reader.Text("version", costs.version);
  reader.Integer("threads", costs.threads, 1, kMostThreads);
  const Json* rows = reader.Take("costs");
  if (rows != nullptr && (!rows->is_array() || rows->size() > kMostRows)) {
    reader.Refuse("costs", rows->is_array() ? Json("longer") : *rows,
                  fmt::format("an array of at most {} objects", kMostRows));
  }
  FMOE_RETURN_IF_ERROR(reader.status());
  if (kind != "cpu_costs") {
    return Status::BadInput(fmt::format("field 'kind' is '{}'; it must be 'cpu_costs'", kind));
  }
  for (size_t index = 0; index < rows->size(); ++index) {
    FMOE_ASSIGN_OR_RETURN(CpuCostRow row, ReadRow((*rows)[index], index));
    costs.rows.push_back(std::move(row));
  }
  return costs;
}

Result<CpuCosts> ReadCpuCosts(const std::string& path, const Machine& machine) {
  constexpr int64_t kMostBytes = 1 << 20;
  FMOE_ASSIGN_OR_RETURN(const std::string text, platform::ReadTextFile(path, kMostBytes));
  Result<CpuCosts> costs = ParseCpuCosts(text);
  if (!costs.ok()) {
    return std::move(costs).status().WithFile(path);
  }
  const auto refuse = [&](const char* field, const std::string& actual, const std::string& required) {
    return Status::BadInput(fmt::format("field '{}' is '{}'; this is '{}'", field, actual, required))
        .WithFile(path)
        .WithHint("measure here: fusedmoe tune --out FILE");
  };
  if (costs->cpu != machine.cpu_name) {
    return refuse("cpu", costs->cpu, machine.cpu_name);
  }
  if (costs->version != FUSEDMOE_VERSION_STRING) {
    return refuse("version", costs->version, FUSEDMOE_VERSION_STRING);
  }
  costs->source = path;
  return costs;
}

}  // namespace fusedmoe
