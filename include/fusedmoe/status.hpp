#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace fusedmoe {

/// What kind of failure a Status reports. The numeric values are the exit codes of the command line.
enum class StatusCode : int {
  kOk = 0,
  kNo = 1,           ///< The question was answered, and the answer is no (a check beyond its bound).
  kUsage = 2,        ///< The caller asked for something that does not exist (unknown name, bad option).
  kBadInput = 3,     ///< A file, tensor or configuration is malformed.
  kUnsupported = 4,  ///< Well-formed and known, but nothing here can do it.
  kSystem = 5,       ///< The operating system, a device or a peer rank failed.
};

/// Success, or a failure that says what failed, the actual value, what was required and what to do.
///
/// An ok Status owns nothing and never allocates, so hot paths may return it. Copyable, immutable after the
/// With... calls, safe to read from many threads.
class [[nodiscard]] Status {
 public:
  Status() = default;

  static Status Ok() { return Status(); }
  static Status No(std::string message) { return Status(StatusCode::kNo, std::move(message)); }
  static Status Usage(std::string message) { return Status(StatusCode::kUsage, std::move(message)); }
  static Status BadInput(std::string message) { return Status(StatusCode::kBadInput, std::move(message)); }
  static Status Unsupported(std::string message) {
    return Status(StatusCode::kUnsupported, std::move(message));
  }
  static Status System(std::string message) { return Status(StatusCode::kSystem, std::move(message)); }

  /// Adds the file, the tensor or the remedy to a failure; no effect on success. The first value given stays,
  /// so that the innermost function, which knows best, wins.
  Status WithFile(std::string_view file) &&;
  Status WithTensor(std::string_view tensor) &&;
  Status WithHint(std::string_view hint) &&;
  /// Puts "context: " before the message.
  Status WithContext(std::string_view context) &&;

  bool ok() const { return detail_ == nullptr; }
  StatusCode code() const { return detail_ == nullptr ? StatusCode::kOk : detail_->code; }
  const std::string& message() const;
  const std::string& file() const;
  const std::string& tensor() const;
  const std::string& hint() const;

  /// One line: "FILE: tensor 'T': message (hint)"; "ok" on success.
  std::string ToString() const;

 private:
  struct Detail {
    StatusCode code = StatusCode::kOk;
    std::string message, file, tensor, hint;
  };

  Status(StatusCode code, std::string message);
  Detail* Mutable();

  std::shared_ptr<const Detail> detail_;  // shared: a Status is copied into plans and per-rank reports
};

/// A value, or the Status that explains why there is none. Reading the value of a failure is a programming
/// error.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}
  Result(Status status) : status_(std::move(status)) {}

  bool ok() const { return value_.has_value(); }
  const Status& status() const& { return status_; }
  Status status() && { return std::move(status_); }

  T& operator*() & { return *value_; }
  const T& operator*() const& { return *value_; }
  T&& operator*() && { return *std::move(value_); }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }

 private:
  std::optional<T> value_;
  Status status_;
};

/// The stable word of a code, as it stands in JSON: "ok", "no", "usage", "bad_input", "unsupported",
/// "system".
std::string_view StatusCodeName(StatusCode code);

/// kUsage "unknown WHAT 'VALUE'; known: NAMES".
Status UnknownName(std::string_view what, std::string_view value, std::string_view names);

}  // namespace fusedmoe

/// Leaves the function with the failure of `expression`, if it failed.
#define FMOE_RETURN_IF_ERROR(expression)                                    \
  do {                                                                      \
    if (::fusedmoe::Status fmoe_status = (expression); !fmoe_status.ok()) { \
      return fmoe_status;                                                   \
    }                                                                       \
  } while (false)

#define FMOE_CONCAT_INNER(a, b) a##b
#define FMOE_CONCAT(a, b) FMOE_CONCAT_INNER(a, b)

/// `FMOE_ASSIGN_OR_RETURN(auto x, F());` binds the value of a Result, or leaves the function with its
/// failure.
#define FMOE_ASSIGN_OR_RETURN(declaration, expression) \
  FMOE_ASSIGN_OR_RETURN_INNER(FMOE_CONCAT(fmoe_result_, __LINE__), declaration, expression)
#define FMOE_ASSIGN_OR_RETURN_INNER(result, declaration, expression) \
  auto result = (expression);                                        \
  if (!result.ok()) {                                                \
    return std::move(result).status();                               \
  }                                                                  \
  declaration = *std::move(result)
