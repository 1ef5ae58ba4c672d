// A call that must be refused, with a message that names all of `parts` and offers a way out.
#pragma once

#include <initializer_list>
#include <string>

#include <gtest/gtest.h>

#include "weft/error.h"

namespace weft {

template <class F>
void expect_refusal(F&& call, std::initializer_list<std::string> parts) {
  try {
    call();
  } catch (const Error& e) {
    EXPECT_FALSE(e.problem().empty());
    EXPECT_FALSE(e.remedy().empty()) << e.what();
    for (const std::string& part : parts) EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    return;
  }
  ADD_FAILURE() << "not refused; expected a message with: " << *parts.begin();
}

}  // namespace weft
