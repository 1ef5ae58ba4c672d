#include "terminal/file_output.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include "index.h"
#include "weft/error.h"

namespace weft::tool {
namespace {

namespace fs = std::filesystem;

constexpr const char* kGiveAnother = "give a file in a folder that exists and can be written";
constexpr const char* kMakeRoom = "make room for the file";

[[noreturn]] void refuse(std::string_view flag, std::string_view path, int error, const char* remedy) {
  throw Error(fmt::format("{}: cannot write '{}': {}", flag, path, std::strerror(error)), remedy);
}

std::optional<struct stat> status_of(const std::string& path) {
  struct stat status;
  return ::stat(path.c_str(), &status) == 0 ? std::optional(status) : std::nullopt;
}

bool same_file(const struct stat& a, const struct stat& b) { return a.st_dev == b.st_dev && a.st_ino == b.st_ino; }

// The descriptor of stdout or stderr if one of them goes to this file.
std::optional<int> own_stream(const struct stat& file) {
  for (const int stream : {STDOUT_FILENO, STDERR_FILENO}) {
    struct stat status;
    if (::fstat(stream, &status) == 0 && same_file(status, file)) return stream;
  }
  return {};
}

// Links are followed, so that the file behind them is replaced and not the link; it need not be there.
std::string behind_links(std::string path) {
  constexpr int kMostLinks = 40;
  std::error_code error;
  for (int n = 0; n < kMostLinks && fs::is_symlink(fs::symlink_status(path, error)); ++n) {
    const fs::path to = fs::read_symlink(path, error);
    path = (to.is_absolute() ? to : fs::path(path).parent_path() / to).string();
  }
  return path;
}

std::string folder_of(const std::string& path) {
  const std::string folder = fs::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

// Files that are written to directly. /dev/fd/3 may lead to a plain file that another process holds open.
bool is_special(const std::string& path, const struct stat& status) {
  return !S_ISREG(status.st_mode) || own_stream(status) || path.starts_with("/dev/") || path.starts_with("/proc/");
}

// A temporary file, removed unless it was renamed.
class Temporary {
 public:
  explicit Temporary(const std::string& folder) {
    for (int n = 0; file_ < 0; ++n) {
      path_ = fmt::format("{}/.weft-{}-{}.tmp", folder, ::getpid(), n);
      file_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      if (file_ < 0 && errno != EEXIST) return;
    }
  }
  ~Temporary() {
    if (file_ >= 0) ::close(file_);
    if (!path_.empty()) ::unlink(path_.c_str());
  }
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;

  int file() const { return file_; }
  bool close() {
    const int file = file_;
    file_ = -1;
    return ::close(file) == 0;
  }
  bool rename_to(const std::string& target) {
    if (::rename(path_.c_str(), target.c_str()) != 0) return false;
    path_.clear();
    return true;
  }

 private:
  std::string path_;
  int file_ = -1;
};

bool write_all(int file, std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = ::write(file, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return false;
    text.remove_prefix(at(n));
  }
  return true;
}

}  // namespace

FileOutput::FileOutput(std::string_view flag, const std::string* path) : flag_(flag) {
  if (!path) return;
  if (path->empty()) refuse(flag, "", ENOENT, kGiveAnother);
  path_ = *path;
  const std::optional<struct stat> status = status_of(path_);
  if (status && S_ISDIR(status->st_mode)) refuse(flag, path_, EISDIR, kGiveAnother);
  if (!status && (errno != ENOENT || path_.ends_with('/'))) refuse(flag, path_, errno, kGiveAnother);
  if (status && ::access(path_.c_str(), W_OK) != 0) refuse(flag, path_, errno, kGiveAnother);
  if (status && is_special(path_, *status)) return;
  target_ = behind_links(path_);
  if (::access(folder_of(target_).c_str(), W_OK | X_OK) != 0) refuse(flag, path_, errno, kGiveAnother);
}

void FileOutput::write(std::string_view text) const {
  if (path_.empty()) return;
  if (!target_.empty()) return replace(text);
  const std::optional<struct stat> status = status_of(path_);
  const std::optional<int> stream = status ? own_stream(*status) : std::nullopt;
  std::fflush(nullptr);  // what was printed comes first
  const int file = stream ? ::dup(*stream) : ::open(path_.c_str(), O_WRONLY | O_TRUNC | O_CLOEXEC);
  if (file < 0) refuse(flag_, path_, errno, kGiveAnother);
  const bool written = write_all(file, text);
  const int error = errno;
  const bool closed = ::close(file) == 0;
  if (!written || !closed) refuse(flag_, path_, written ? errno : error, kMakeRoom);
}

void FileOutput::replace(std::string_view text) const {
  Temporary file(folder_of(target_));
  if (file.file() < 0) refuse(flag_, path_, errno, kGiveAnother);
  if (const std::optional<struct stat> old = status_of(target_)) {  // keep the permissions of the old file
    if (::fchmod(file.file(), old->st_mode & 07777) != 0) refuse(flag_, path_, errno, kGiveAnother);
  }
  if (!write_all(file.file(), text) || ::fsync(file.file()) != 0 || !file.close() || !file.rename_to(target_))
    refuse(flag_, path_, errno, kMakeRoom);
}

std::string read_file(const std::string& path, std::size_t most, const std::string& remedy) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"), &std::fclose);
  std::string text;
  char buffer[1 << 16];
  for (std::size_t n; file && (n = std::fread(buffer, 1, sizeof buffer, file.get())) > 0;) {
    text.append(buffer, n);
    if (text.size() > most)
      throw Error(fmt::format("'{}' is longer than {} MiB", path, most >> 20), "give a smaller file");
  }
  if (!file || std::ferror(file.get()) != 0)
    throw Error(fmt::format("cannot read '{}': {}", path, std::strerror(errno)), remedy);
  return text;
}

void check_outputs(const Flags& flags) {
  struct Output {
    std::string flag, path, spelled;
    std::optional<struct stat> status;
  };
  std::vector<Output> outputs;
  for (const char* flag : {"html", "svg", "json", "trace", "calibrate"}) {
    const std::string* path = flags.find(flag);
    if (!path || path->empty()) continue;
    const std::string target = behind_links(*path);
    std::error_code error;
    outputs.push_back({flag, *path,
                       (fs::weakly_canonical(folder_of(target), error) / fs::path(target).filename()).string(),
                       status_of(*path)});
    const Output& now = outputs.back();
    for (std::size_t i = 0; i + 1 < outputs.size(); ++i) {
      const Output& before = outputs[i];
      const bool same =
          before.status && now.status ? same_file(*before.status, *now.status) : before.spelled == now.spelled;
      if (same && !(now.status && S_ISCHR(now.status->st_mode)))
        throw Error(fmt::format("--{} {} and --{} {} are one file", before.flag, before.path, now.flag, now.path),
                    "give each a file of its own");
    }
  }
}

}  // namespace weft::tool
