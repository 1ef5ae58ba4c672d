// The JSON that a page draws from, and the page itself: one HTML file with data, style and script.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "weft/simulate.h"

namespace weft::draw {

// A JSON list of items that are JSON already.
class JsonList {
 public:
  void add(const std::string& item) {
    if (!items_.empty()) items_ += ',';
    items_ += item;
  }
  std::string json() const { return "[" + items_ + "]"; }

 private:
  std::string items_;
};

// Columns of whole numbers, each written as differences.
class JsonColumns {
 public:
  explicit JsonColumns(std::size_t count) : columns_(count) {}
  template <class... Values>
  void add(Values... values) {
    std::size_t i = 0;
    (columns_[i++].push_back(values), ...);
  }
  std::string json() const;

 private:
  std::vector<std::vector<Index>> columns_;
};

std::string json_number(double value, int digits = 6);

// The timelines of the ranks in `timeline.detail`, with at most `most` events in all: ranks that do not fit are left
// out. At most `most_of_rank` events of one rank.
std::string timeline_json(const Timeline& timeline, Index most, Index most_of_rank);

// The page of draw/page, filled in. `title` is any text, `data` is JSON.
std::string filled_page(std::string_view title, const std::string& data);

}  // namespace weft::draw
