// Whether this build runs under a sanitizer. Those are slow, and need every path rather than many numbers.
#pragma once

#include <cstddef>
#include <vector>

namespace weft::test {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#elif defined(__has_feature)  // clang
inline constexpr bool kSanitized = __has_feature(thread_sanitizer) || __has_feature(address_sanitizer);
#else
inline constexpr bool kSanitized = false;
#endif

template <class T>
std::vector<T> fewer_if_sanitized(std::vector<T> list, std::size_t count) {
  if (kSanitized) list.resize(count);
  return list;
}

}  // namespace weft::test
