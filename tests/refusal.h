// Calls that must be refused.
#pragma once

#include <initializer_list>
#include <string>

#include <gtest/gtest.h>

#include "weft/error.h"

namespace weft {

// What a call was refused with; "": it was not.
template <class F>
std::string error_of(F&& call) {
  try {
    call();
  } catch (const Error& e) {
    EXPECT_FALSE(e.problem().empty());
    EXPECT_FALSE(e.remedy().empty()) << e.what();
    return e.what();
  }
  return "";
}

inline void expect_parts(const std::string& text, std::initializer_list<std::string> parts) {
  for (const std::string& part : parts)
    EXPECT_NE(text.find(part), std::string::npos) << "'" << text << "' not " << part;
}

// Refused with a message that names all of `parts` and offers a way out.
template <class F>
void expect_refusal(F&& call, std::initializer_list<std::string> parts) {
  const std::string said = error_of(call);
  EXPECT_NE(said, "") << "not refused; expected a message with: " << *parts.begin();
  if (!said.empty()) expect_parts(said, parts);
}

}  // namespace weft
