// The command with any words: lines of the input are its arguments, what follows a form feed is in every file it reads.
// Done, or refused by a weft::Error; anything else, another exception or a failed check, is a finding. Numbers are kept
// small, so that nothing asked for is a day's work; those past 2^33 stay as they are, and must be refused.
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>

#include "verbs.h"
#include "weft/error.h"

// The command writes and reads no file: the linker brings every fopen, open, rename and unlink here (--wrap). The
// fuzzer's own are left alone.
// NOLINTBEGIN(bugprone-reserved-identifier)
extern "C" std::FILE* __real_fopen(const char* path, const char* mode);
extern "C" std::FILE* __wrap_fopen(const char* path, const char* mode);
extern "C" int __real_open(const char* path, int flags, ...);
extern "C" int __wrap_open(const char* path, int flags, ...);
extern "C" int __real_rename(const char* from, const char* to);
extern "C" int __wrap_rename(const char* from, const char* to);
extern "C" int __real_unlink(const char* path);
extern "C" int __wrap_unlink(const char* path);
// NOLINTEND(bugprone-reserved-identifier)

namespace {

std::string file_text;
bool in_command = false;

constexpr std::string_view kLong[] = {"--calibrate", "--check-kernels", "--predict", "--peer", "--cases"};
constexpr std::size_t kLongest = 80;
constexpr unsigned long long kSmall = 13, kRefused = 1ULL << 33;

bool has(const std::vector<std::string>& words, std::string_view flag) {
  for (const std::string& word : words)
    if (std::string_view(word).substr(0, flag.size()) == flag) return true;
  return false;
}

// Digits that say a number one could wait for become a small one.
std::string tamed(std::string_view word) {
  std::string out;
  for (std::size_t at = 0; at < word.size();) {
    std::size_t end = at;
    while (end < word.size() && word[end] >= '0' && word[end] <= '9') ++end;
    if (end == at) {
      out += word[at++];
      continue;
    }
    const std::string digits(word.substr(at, end - at));
    const unsigned long long value = digits.size() > 18 ? kRefused : std::strtoull(digits.c_str(), nullptr, 10);
    out += value < kSmall || value >= kRefused ? digits : std::to_string(value % kSmall);
    at = end;
  }
  return out;
}

std::vector<std::string> words_of(std::string_view text) {
  std::vector<std::string> words;
  while (!text.empty() && words.size() < 24) {
    const std::size_t end = text.find('\n');
    const std::string_view word = text.substr(0, end);
    words.push_back(tamed(word.substr(0, kLongest).substr(0, word.find('\0'))));
    if (end == std::string_view::npos) break;
    text.remove_prefix(end + 1);
  }
  return words;
}

}  // namespace

extern "C" std::FILE* __wrap_fopen(const char* path, const char* mode) {  // NOLINT(bugprone-reserved-identifier)
  if (!in_command) return __real_fopen(path, mode);
  if (*path == '\0' || *mode != 'r') return *path == '\0' ? nullptr : __real_fopen("/dev/null", mode);
  if (file_text.empty()) return __real_fopen("/dev/null", mode);
  return fmemopen(file_text.data(), file_text.size(), "rb");
}

// What is written goes into memory.
extern "C" int __wrap_open(const char* path, int flags, ...) {  // NOLINT(bugprone-reserved-identifier)
  if (in_command && (flags & O_ACCMODE) != O_RDONLY) return memfd_create("output", MFD_CLOEXEC);
  va_list more;
  va_start(more, flags);
  const auto mode = (flags & O_CREAT) != 0 ? va_arg(more, unsigned) : 0u;
  va_end(more);
  return __real_open(path, flags, mode);
}

extern "C" int __wrap_rename(const char* from, const char* to) {  // NOLINT(bugprone-reserved-identifier)
  return in_command ? 0 : __real_rename(from, to);
}

extern "C" int __wrap_unlink(const char* path) {  // NOLINT(bugprone-reserved-identifier)
  return in_command ? 0 : __real_unlink(path);
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view all(reinterpret_cast<const char*>(data), size);
  const std::size_t feed = all.find('\f');
  file_text = feed == std::string_view::npos ? "" : std::string(all.substr(feed + 1));
  std::vector<std::string> words = words_of(all.substr(0, feed));
  for (const std::string_view flag : kLong)
    if (has(words, flag)) return -1;
  if (!words.empty() && words[0] == "bench") {  // times nothing, and still looks at every flag
    if (has(words, "--schedule") || has(words, "--kernel")) return -1;
    if (!has(words, "--list")) words.push_back("--list");
  }
  if (has(words, "--matrix") || has(words, "--set") || has(words, "--random")) {
    if (has(words, "--time-limit")) return -1;
    words.insert(words.end(), {"--time-limit", "0.001"});
  }
  words.insert(words.begin(), "weft");
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  // Too short a time, or a kernel that cannot, is no answer either: 1, as for a failed check.
  const bool may_check_nothing = has(words, "--time-limit") || has(words, "--kernel");
  struct Inside {
    Inside() { in_command = true; }
    ~Inside() { in_command = false; }
  };
  try {
    const int code = [&] {
      const Inside inside;
      return weft::tool::run(static_cast<int>(words.size()), argv.data());
    }();
    if (code == 0 || code == 2 || (code == 1 && may_check_nothing)) return 0;
    for (const std::string& word : words) std::fprintf(stderr, "'%s' ", word.c_str());
    std::fprintf(stderr, "\nended with %d\n", code);
    std::abort();
  } catch (const weft::Error&) {
  }
  return 0;
}
