// Lets one call of the C library about files fail, for the tests of the command, which load this before it:
//   WEFT_FAIL=<calls before that one>:<errno, or 0: a write of half the bytes>   WEFT_FAILED=<file that says which it
//   was>
// What stdio does inside itself does not come by here.
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace {

template <class F>
F* real(const char* name) {
  return reinterpret_cast<F*>(::dlsym(RTLD_NEXT, name));
}

struct Plan {
  long before = -1;
  int error = 0;

  Plan() {
    const char* said = std::getenv("WEFT_FAIL");
    if (said == nullptr) return;
    char* rest = nullptr;
    before = std::strtol(said, &rest, 10);
    if (*rest == ':') error = static_cast<int>(std::strtol(rest + 1, nullptr, 10));
  }
};

void tell(const char* name) {
  const char* path = std::getenv("WEFT_FAILED");
  static const auto open_file = real<int(const char*, int, ...)>("open");
  static const auto write_file = real<ssize_t(int, const void*, std::size_t)>("write");
  const int file = path == nullptr ? -1 : open_file(path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
  if (file >= 0 && write_file(file, name, std::strlen(name)) < 0) std::abort();
}

const Plan& plan() {
  static const Plan made;
  return made;
}

// Whether this call is the one.
bool fails(const char* name) {
  static std::atomic<long> made{0};
  if (plan().before < 0 || made++ != plan().before) return false;
  tell(name);
  errno = plan().error;
  return true;
}

}  // namespace

#pragma GCC visibility push(default)  // the command calls these
extern "C" {

int open(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const int mode = va_arg(more, int);
  va_end(more);
  static const auto call = real<int(const char*, int, ...)>("open");
  return plan().error != 0 && fails("open") ? -1 : call(path, flags, mode);
}

ssize_t write(int file, const void* data, std::size_t bytes) {
  static const auto call = real<ssize_t(int, const void*, std::size_t)>("write");
  if (!fails("write")) return call(file, data, bytes);
  return plan().error != 0 ? -1 : call(file, data, (bytes + 1) / 2);
}

int fsync(int file) {
  static const auto call = real<int(int)>("fsync");
  return plan().error != 0 && fails("fsync") ? -1 : call(file);
}

int close(int file) {
  static const auto call = real<int(int)>("close");
  if (plan().error == 0 || !fails("close")) return call(file);
  call(file);  // it is closed all the same
  errno = plan().error;
  return -1;
}

int fchmod(int file, mode_t mode) {
  static const auto call = real<int(int, mode_t)>("fchmod");
  return plan().error != 0 && fails("fchmod") ? -1 : call(file, mode);
}

int rename(const char* from, const char* to) {
  static const auto call = real<int(const char*, const char*)>("rename");
  return plan().error != 0 && fails("rename") ? -1 : call(from, to);
}

std::FILE* fopen(const char* path, const char* mode) {
  static const auto call = real<std::FILE*(const char*, const char*)>("fopen");
  return plan().error != 0 && fails("fopen") ? nullptr : call(path, mode);
}

std::size_t fread(void* to, std::size_t size, std::size_t count, std::FILE* file) {
  static const auto call = real<std::size_t(void*, std::size_t, std::size_t, std::FILE*)>("fread");
  if (plan().error == 0 || !fails("fread")) return call(to, size, count, file);
  // So that ferror() says so: the descriptor is replaced by one that cannot be read.
  static const auto open_file = real<int(const char*, int, ...)>("open");
  const int closed = open_file("/dev/null", O_WRONLY);
  ::dup2(closed, ::fileno(file));
  return call(to, size, count, file);
}

int fflush(std::FILE* file) {
  static const auto call = real<int(std::FILE*)>("fflush");
  return plan().error != 0 && fails("fflush") ? EOF : call(file);
}
}  // extern "C"
#pragma GCC visibility pop
