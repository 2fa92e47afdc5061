#include "jobs/common/unfinished_output.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "checkpoint/files/config_files.hpp"
#include "platform/output_file.hpp"

namespace fusedmoe::jobs {
namespace {

namespace fs = std::filesystem;
// Tells a directory that a killed run left behind from one that somebody else put there.
constexpr std::string_view kMarker = ".fusedmoe-incomplete";

/// Whether `inner` is `outer` or lies below it, by what stands on the disk.
bool IsWithin(const fs::path& inner, const fs::path& outer) {
  std::error_code error;
  for (fs::path place = fs::weakly_canonical(inner, error); !error; place = place.parent_path()) {
    if (fs::equivalent(place, outer, error)) {
      return true;
    }
    if (place == place.parent_path()) {
      return false;
    }
  }
  return false;
}

/// What `convert --to gguf` leaves in a folder.
bool HoldsGguf(const fs::path& directory) {
  std::error_code error;
  return fs::exists(directory / "model.gguf", error) && fs::exists(directory / kConversionReport, error);
}

/// --force removes the whole folder: what else than a checkpoint lies there may be anybody's.
Status CheckReplaceable(const fs::path& directory, const std::vector<std::string>& sources) {
  if (std::any_of(sources.begin(), sources.end(),
                  [&](const std::string& source) { return IsWithin(source, directory); })) {
    return Status::Usage("what stands there is, or holds, the checkpoint that is read")
        .WithFile(directory.string())
        .WithHint("choose another name");
  }
  std::error_code error;
  if (fs::is_directory(directory, error) && !fs::is_empty(directory, error) &&
      !fs::exists(directory / checkpoint::kModelConfigFile, error) && !HoldsGguf(directory)) {
    return Status::Usage("the folder is not empty and holds no config.json; only a checkpoint is replaced")
        .WithFile(directory.string())
        .WithHint("choose another folder, or remove this one");
  }
  return Status::Ok();
}

/// All but the mark.
void ClearUnfinished(const fs::path& temporary) {
  std::error_code ignored;
  std::vector<fs::path> files;
  for (fs::directory_iterator entry(temporary, ignored), end; !ignored && entry != end;
       entry.increment(ignored)) {
    if (entry->path().filename() != kMarker) {
      files.push_back(entry->path());
    }
  }
  for (const fs::path& file : files) {
    fs::remove_all(file, ignored);
  }
}

/// Where Commit moves the checkpoint that it replaces.
fs::path MovedAway(const fs::path& temporary) {
  return temporary.string() + ".old";
}

/// What a run that was killed in Commit has moved away: the only checkpoint of that name goes back, one that
/// has been replaced goes for good.
Status ClearMovedAway(const fs::path& temporary, const OutputPlace& place, const fs::path& final_path) {
  const fs::path old = MovedAway(temporary);
  std::error_code error;
  if (!fs::exists(old, error)) {
    return Status::Ok();
  }
  if (fs::exists(final_path, error)) {
    fs::remove_all(old, error);
    return Status::Ok();
  }
  fs::rename(old, final_path, error);
  if (error) {
    return Status::System("cannot move the directory back: " + error.message()).WithFile(old.string());
  }
  return place.overwrite
             ? Status::Ok()
             : Status::Usage("the directory is not empty: a run that was killed had moved it away")
                   .WithFile(place.directory)
                   .WithHint("--force replaces it");
}

/// The mark goes last: a run that is killed meanwhile leaves what the next one knows for its own.
void RemoveUnfinished(const fs::path& temporary) {
  std::error_code ignored;
  ClearUnfinished(temporary);
  fs::remove_all(temporary, ignored);
}

/// Whether something may be written under that name.
Status CheckFinal(const fs::path& final_path, bool single_file, const OutputPlace& place) {
  std::error_code error;
  const bool is_directory = fs::is_directory(final_path, error), exists = fs::exists(final_path, error);
  if (single_file && !place.gguf) {
    return Status::Usage("a directory is written; a name that ends in .gguf is that of a GGUF file")
        .WithFile(place.directory)
        .WithHint("convert --to gguf writes those");
  }
  if (exists && !single_file && !is_directory) {
    return Status::Usage("a file stands there, and a directory is to be written").WithFile(place.directory);
  }
  if (exists && !place.overwrite && (single_file || !fs::is_empty(final_path, error))) {
    return Status::Usage(single_file ? "the file exists" : "the directory is not empty")
        .WithFile(place.directory)
        .WithHint("--force replaces it");
  }
  if (exists && place.overwrite) {
    FMOE_RETURN_IF_ERROR(CheckReplaceable(final_path, place.sources));
  }
  return Status::Ok();
}

/// Another folder can be moved to the name of a folder, but not to the root of a file system (a volume of a
/// container, say).
Status CheckNoMount(const fs::path& folder) {
  struct stat own = {}, around = {};
  const std::string parent = folder.has_parent_path() ? folder.parent_path().string() : ".";
  if (stat(folder.c_str(), &own) != 0 || stat(parent.c_str(), &around) != 0 || own.st_dev == around.st_dev) {
    return Status::Ok();
  }
  return Status::Usage("the folder is the root of a file system, whose place no other folder can take")
      .WithFile(folder.string())
      .WithHint("name a new folder in it");
}

/// A link to a folder is followed: the folder is written and the link stays. A link to a file is replaced.
Result<fs::path> BehindLinks(const fs::path& path) {
  std::error_code error;
  if (!fs::is_symlink(path, error)) {
    return path;
  }
  fs::path target = fs::canonical(path, error);
  if (error) {
    return Status::Usage("a link that leads nowhere stands there").WithFile(path.string());
  }
  return fs::is_directory(target, error) ? std::move(target) : path;
}

}  // namespace

Result<std::unique_ptr<UnfinishedOutput>> UnfinishedOutput::Take(const OutputPlace& place) {
  std::error_code error;
  fs::path final_path = fs::path(place.directory).lexically_normal();
  if (!final_path.has_filename()) {
    final_path = final_path.parent_path();  // "DIR/"
  }
  if (final_path.empty() || final_path.filename() == "." || final_path.filename() == "..") {
    return Status::Usage(
        fmt::format("'{}' cannot be made: a name for a new directory is needed", place.directory));
  }
  FMOE_ASSIGN_OR_RETURN(final_path, BehindLinks(final_path));
  const bool single_file = final_path.extension() == ".gguf" && !fs::is_directory(final_path, error);
  if (!single_file) {
    FMOE_RETURN_IF_ERROR(CheckNoMount(final_path));
  }
  FMOE_RETURN_IF_ERROR(CheckFinal(final_path, single_file, place));
  const fs::path temporary =
      final_path.parent_path() / fmt::format(".{}.incomplete", final_path.filename().string());
  const fs::path marker = temporary / kMarker;
  fs::create_directories(temporary, error);
  if (error) {
    return Status::System("cannot create the directory: " + error.message()).WithFile(temporary.string());
  }
  // A run that was killed has left the directory with its mark, or empty.
  const bool marked = fs::exists(marker, error);
  if (!error && !marked && !fs::is_empty(temporary, error) && !error) {
    return Status::Usage(
               "this folder, the place for unfinished files, holds files that no fusedmoe run wrote")
        .WithFile(temporary.string())
        .WithHint("remove or rename it");
  }
  if (error) {
    return Status::System("cannot look into the directory: " + error.message()).WithFile(temporary.string());
  }
  Result<std::unique_ptr<platform::FileLock>> lock = platform::FileLock::Take(marker.string());
  if (!lock.ok()) {
    return lock.status().code() == StatusCode::kUsage
               ? Status::Usage("another run writes there").WithFile(place.directory)
               : lock.status();
  }
  ClearUnfinished(temporary);
  if (Status moved = ClearMovedAway(temporary, place, final_path); !moved.ok()) {
    RemoveUnfinished(temporary);
    return moved;
  }
  std::unique_ptr<UnfinishedOutput> output(new UnfinishedOutput);
  output->final_ = final_path.string();
  output->temporary_ = temporary.string();
  output->overwrite_ = place.overwrite;
  if (single_file) {
    output->single_file_ = true;
    output->gguf_name_ = final_path.filename().string();
  }
  output->lock_ = *std::move(lock);
  return output;
}

UnfinishedOutput::~UnfinishedOutput() {
  if (!committed_) {
    RemoveUnfinished(temporary_);
  }
}

Status UnfinishedOutput::Commit() {
  std::error_code error;
  const auto failed = [&](std::string_view what) {
    return Status::System(fmt::format("cannot {}: {}", what, error.message())).WithFile(final_);
  };
  if (single_file_) {  // the destructor removes the rest
    if (!overwrite_) {
      return platform::MoveToNewName(gguf_path(), final_);
    }
    fs::rename(gguf_path(), final_, error);
    return error ? failed("move the file to its name") : Status::Ok();
  }
  fs::path old;
  if (overwrite_ && fs::exists(final_, error) && !fs::is_empty(final_, error)) {
    old = MovedAway(temporary_);
    fs::rename(final_, old, error);
    if (error) {
      return failed("move the old directory away");
    }
  }
  fs::rename(temporary_, final_, error);
  if (error) {
    const Status status = failed("move the directory to its name");
    if (!old.empty()) {
      fs::rename(old, final_, error);
    }
    return status;
  }
  committed_ = true;
  // Last, so that a run killed here has left either a marked directory or a complete one.
  fs::remove(final_ + "/" + std::string(kMarker), error);
  if (!old.empty()) {
    fs::remove_all(old, error);
  }
  return Status::Ok();
}

}  // namespace fusedmoe::jobs
