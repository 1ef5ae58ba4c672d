// weft explain --flight: the last calls of ranks that hung or failed, side by side.
#include "draw/flight/flight.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "explain/modes.h"
#include "index.h"
#include "terminal/file_output.h"
#include "terminal/json_file.h"
#include "terminal/numbers.h"
#include "weft/error.h"

namespace weft::tool {
namespace {

using nlohmann::json;

constexpr const char* kRemedy = "give files that keep_flight_file or --flight of a run has written";

[[noreturn]] void refuse_record(const std::string& file, const std::string& what) {
  throw Error(fmt::format("--flight: '{}': {}", file, what), kRemedy);
}

// Members of a record, which anybody may have written.
class Record {
 public:
  Record(const std::string& file, const json& value) : file_(file), value_(value) {
    if (!value.is_object()) refuse_record(file, "a line is not an object");
  }
  const json& at(const char* key) const {
    const auto found = value_.find(key);
    if (found == value_.end()) refuse_record(file_, fmt::format("\"{}\" is missing", key));
    return *found;
  }
  Index whole(const char* key, Index least, Index most) const {
    const json& v = at(key);
    if (!v.is_number_integer() || (v.is_number_unsigned() && v.get<std::uint64_t>() > std::uint64_t(most)) ||
        v.get<Index>() < least || v.get<Index>() > most)
      refuse_record(file_, fmt::format("\"{}\" is not a whole number from {} to {}", key, least, most));
    return v.get<Index>();
  }
  double seconds(const char* key) const {
    const json& v = at(key);
    if (!v.is_number() || !std::isfinite(v.get<double>()) || std::abs(v.get<double>()) > 1e12)
      refuse_record(file_, fmt::format("\"{}\" is not a time in seconds", key));
    return v.get<double>();
  }
  std::string word(const char* key) const {
    const json& v = at(key);
    constexpr std::size_t kLongest = 200;
    if (!v.is_string() || v.get_ref<const std::string&>().size() > kLongest)
      refuse_record(file_, fmt::format("\"{}\" is not a short text", key));
    return v.get<std::string>();
  }

 private:
  const std::string& file_;
  const json& value_;
};

constexpr Index kMost = Index{1} << 40, kMostRanks = Index{1} << 20;

draw::FlightCall call_of(const std::string& file, const json& value) {
  const Record r(file, value);
  return {.number = r.whole("number", 0, kMost),
          .kind = r.word("kind"),
          .pass = r.word("pass"),
          .step = r.whole("step", -1, kMost),
          .state = r.word("state"),
          .to = r.word("to"),
          .from = r.word("from"),
          .bytes_to = r.whole("to_bytes", 0, kMost),
          .bytes_from = r.whole("from_bytes", 0, kMost),
          .begun = r.seconds("begun"),
          .seconds = std::max(r.seconds("seconds"), 0.0)};
}

draw::FlightRank rank_of(const std::string& file, const Record& r) {
  draw::FlightRank rank{
      .rank = r.whole("rank", 0, kMostRanks), .pid = r.whole("pid", 0, kMost), .time = r.seconds("time")};
  const json& calls = r.at("calls");
  if (!calls.is_array()) refuse_record(file, "\"calls\" is not a list");
  for (const json& call : calls) rank.calls.push_back(call_of(file, call));
  for (std::size_t i = 1; i < rank.calls.size(); ++i)
    if (rank.calls[i].number <= rank.calls[i - 1].number) refuse_record(file, "calls are not in their order");
  return rank;
}

// Where a record goes: the communicator of that name and size in which its rank is not there yet. Processes make their
// communicators in the same order.
void add(std::vector<draw::Flight>& flights, const std::string& file, const Record& r) {
  const std::string comm = r.word("comm");
  const Index ranks = r.whole("ranks", 1, kMostRanks);
  draw::FlightRank rank = rank_of(file, r);
  if (rank.rank >= ranks) refuse_record(file, fmt::format("rank {} of {}", rank.rank, ranks));
  for (draw::Flight& flight : flights) {
    if (flight.comm != comm || flight.ranks != ranks) continue;
    const auto same = std::find_if(flight.recorded.begin(), flight.recorded.end(),
                                   [&](const draw::FlightRank& other) { return other.rank == rank.rank; });
    if (same == flight.recorded.end()) return flight.recorded.push_back(std::move(rank));
    if (same->pid != rank.pid)
      refuse_record(file, fmt::format("rank {} of {} ({}) comes from two processes, {} and {}", rank.rank, ranks, comm,
                                      same->pid, rank.pid));
  }
  flights.push_back({comm, ranks, {std::move(rank)}});
}

std::vector<draw::Flight> read_flights(const std::string& files) {
  constexpr std::size_t kMaxBytes = std::size_t{64} << 20;
  std::vector<draw::Flight> flights;
  for (const std::string_view name : split(files, '\n')) {
    const std::string file(name);
    std::string text = read_file(file, kMaxBytes, kRemedy), list;
    for (const std::string_view line : split(text, '\n'))
      if (!line.empty()) list += fmt::format("{}{}", list.empty() ? "" : ",", line);
    for (const json& record : read_json(file, "[" + list + "]", R"({"weft_flight":1,"rank":0,"ranks":4,..})")) {
      const Record r(file, record);
      if (r.whole("weft_flight", 0, 99) != 1) refuse_record(file, "a record of another version of Weft");
      add(flights, file, r);
    }
  }
  // A communicator that nobody has called says nothing.
  std::erase_if(flights, [](const draw::Flight& f) {
    return std::all_of(f.recorded.begin(), f.recorded.end(), [](const draw::FlightRank& r) { return r.calls.empty(); });
  });
  for (draw::Flight& f : flights)
    std::sort(f.recorded.begin(), f.recorded.end(), [](const auto& a, const auto& b) { return a.rank < b.rank; });
  if (flights.empty()) throw Error("--flight: no call is recorded in these files", kRemedy);
  return flights;
}

std::string short_seconds(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.0f} us", seconds * 1e6);
  return seconds < 1 ? fmt::format("{:.1f} ms", seconds * 1e3) : fmt::format("{:.1f} s", seconds);
}

// A line a rank: '=' in a call that ended, '#' in one that has not, 'x' in one that failed, '|' where they parted.
void print_timeline(const draw::Flight& flight, const draw::Parting& parted) {
  constexpr Index kColumns = 72;
  double begin = INFINITY, end = -INFINITY, mark = INFINITY;
  for (const draw::FlightRank& rank : flight.recorded)
    for (const draw::FlightCall& c : rank.calls) {
      begin = std::min(begin, c.begun);
      end = std::max(end, c.begun + c.seconds);
      if (c.number == parted.call) mark = std::min(mark, c.begun);
    }
  const double each = std::max(end - begin, 1e-9) / static_cast<double>(kColumns);
  const auto column = [&](double time) {
    return std::clamp<Index>(static_cast<Index>((time - begin) / each), 0, kColumns - 1);
  };
  for (const draw::FlightRank& rank : flight.recorded) {
    std::string line(at(kColumns), ' ');
    for (const draw::FlightCall& c : rank.calls)
      for (Index i = column(c.begun); i <= column(c.begun + c.seconds); ++i)
        line[at(i)] = c.state == "failed" ? 'x' : c.state == "done" ? '=' : '#';
    if (std::isfinite(mark) && line[at(column(mark))] == ' ') line[at(column(mark))] = '|';
    fmt::print("  rank {:<5}{}\n", rank.rank, line);
  }
  fmt::print("  {:<10}0{:>{}}   = done  # not over  x failed\n\n", "", short_seconds(end - begin), kColumns - 1);
}

void print_table(const draw::Flight& flight, const draw::Parting& parted) {
  constexpr Index kShown = 8;
  constexpr std::size_t kMostRanksShown = 8;
  Index last = 0;
  for (const draw::FlightRank& rank : flight.recorded)
    if (!rank.calls.empty()) last = max_of(last, rank.calls.back().number);
  const Index first = max_of(0, parted.call < 0 ? last - kShown + 1 : min_of(parted.call - 3, last - kShown + 1));
  const std::size_t shown = std::min(flight.recorded.size(), kMostRanksShown);
  fmt::print("  {:<38}", "call");
  for (std::size_t i = 0; i < shown; ++i) fmt::print("{:<18}", fmt::format("rank {}", flight.recorded[i].rank));
  fmt::print("\n");
  for (Index call = first; call <= min_of(last, first + 2 * kShown); ++call) {
    std::string name, cells;
    for (std::size_t i = 0; i < shown; ++i) {
      const draw::FlightCall* c = flight.recorded[i].find(call);
      if (c != nullptr && name.empty()) name = c->name();
      const std::string words = c == nullptr        ? "-"
                                : c->name() == name ? fmt::format("{} {}", c->state, short_seconds(c->seconds))
                                                    : c->name();
      cells += fmt::format("{:<18}", words.substr(0, 17));
    }
    fmt::print("{} {:<38}{}\n", call == parted.call ? ">" : " ", fmt::format("#{} {}", call, name).substr(0, 37),
               cells);
  }
  if (shown < flight.recorded.size())
    fmt::print("  and {} more ranks: --html FILE shows all\n", flight.recorded.size() - shown);
}

// What a file says is shown on a terminal: nothing of it may steer that.
std::string plain(std::string text) {
  std::replace_if(text.begin(), text.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return text;
}

}  // namespace

int explain_flight(const Flags& flags) {
  FileOutput page("--html", flags.find("html"));
  std::vector<draw::Flight> flights = read_flights(*flags.find("flight"));
  const std::string html = page ? draw::flight_html(flights, "weft explain" + flags.words()) : "";
  for (draw::Flight& flight : flights) {
    flight.comm = plain(flight.comm);
    for (draw::FlightRank& rank : flight.recorded)
      for (draw::FlightCall& c : rank.calls)
        for (std::string* word : {&c.kind, &c.pass, &c.state}) *word = plain(*word);
    const draw::Parting parted = draw::parting(flight);
    fmt::print("{} ranks, {}\n", flight.ranks, flight.comm);
    for (const std::string& line : parted.words) fmt::print("{}\n", line);
    fmt::print("\n");
    print_timeline(flight, parted);
    print_table(flight, parted);
    fmt::print("\n");
  }
  if (page) {
    page.write(html);
    fmt::print("{}: {}\n", page.path(), bytes_text(static_cast<Index>(html.size())));
  }
  return 0;
}

}  // namespace weft::tool
