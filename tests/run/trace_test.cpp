// Traces: what they say is what was simulated or observed, and a viewer can nest it.
#include "weft/trace.h"

#include <algorithm>
#include <map>
#include <regex>
#include <vector>

#include <gtest/gtest.h>

#include "index.h"
#include "weft/executor.h"
#include "weft/simulate.h"

namespace weft {
namespace {

struct Event {
  int pid = 0, tid = 0;
  std::string name;
  double begin = 0, end = 0;  // us
};

std::vector<Event> events_of(const std::string& json) {
  const std::regex line(R"re(\{"pid":(\d+),"tid":(\d+),"ph":"X","name":"([^"]*)","ts":([\d.]+),"dur":([\d.]+),)re");
  std::vector<Event> events;
  for (std::sregex_iterator i(json.begin(), json.end(), line), end; i != end; ++i) {
    const double begin = std::stod((*i)[4]);
    events.push_back({std::stoi((*i)[1]), std::stoi((*i)[2]), (*i)[3], begin, begin + std::stod((*i)[5])});
  }
  return events;
}

// Two events of a track lie in each other or apart.
void expect_nested(const std::vector<Event>& events) {
  constexpr double kRounding = 1e-4;  // us; the file has whole nanoseconds
  for (const Event& a : events)
    for (const Event& b : events) {
      if (a.pid != b.pid || a.tid != b.tid || a.begin > b.begin) continue;
      EXPECT_TRUE(a.end <= b.begin + kRounding || a.end >= b.end - kRounding || a.begin >= b.begin - kRounding)
          << a.name << " and " << b.name;
    }
}

const Problem& problem() {
  static const Problem made(Stream::from_lengths(std::vector<Index>{300, 40, 172}), {.causal = true});
  return made;
}

TEST(Trace, HasTheEventsOfATimeline) {
  for (const ScheduleKind kind :
       {ScheduleKind::ring, ScheduleKind::exact, ScheduleKind::all_to_all, ScheduleKind::mesh}) {
    const Job job{
        problem(), make_layouts(LayoutKind::zigzag, problem(), 4), 8, 4, {.kind = kind}, {DType::bf16, 128, 128}};
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      const Timeline t = simulate(job, machine_preset("h100-400g"), pass, {.detail = {0, 1, 2, 3}});
      Trace trace;
      trace.add(t, "a \"name\"", 1e-3);
      const std::string json = trace.json();
      EXPECT_NE(json.find(R"("name":"a \"name\": rank 3")"), std::string::npos);
      const std::vector<Event> events = events_of(json);
      expect_nested(events);
      for (const RankTimeline& line : t.detail) {
        std::vector<std::pair<double, double>> want, got;
        double last = 0;
        for (const TimelineEvent& e : line.events) {
          want.emplace_back(1e3 + e.begin * 1e6, 1e3 + e.end * 1e6);
          last = std::max(last, e.end);
        }
        want.emplace_back(1e3, 1e3 + last * 1e6);  // the pass
        for (const Event& e : events)
          if (e.pid == line.rank + 1) got.emplace_back(e.begin, e.end);
        ASSERT_EQ(got.size(), want.size());
        std::sort(got.begin(), got.end());
        std::sort(want.begin(), want.end());
        for (std::size_t i = 0; i < got.size(); ++i) {
          EXPECT_NEAR(got[i].first, want[i].first, 2e-3);
          EXPECT_NEAR(got[i].second, want[i].second, 2e-3);
        }
      }
    }
  }
}

TEST(Trace, RecordsStepsOfAnExecutor) {
  constexpr Index kRanks = 3, kHeads = 2, kDim = 8;
  const Layouts layouts = make_layouts(LayoutKind::zigzag, problem(), kRanks);
  Trace trace;
  std::vector<std::vector<StepEvent>> seen(kRanks);
  run_ranks(kRanks, [&](Communicator& comm) {
    std::vector<float> q(at(layouts.q.rows() * kHeads * kDim), 0.5F), out(q);
    const auto view = [&](std::vector<float>& x) { return thd(x.data(), DType::f32, layouts.q.rows(), kHeads, kDim); };
    const auto observer = trace.observer(comm.rank(), "ring");
    Executor executor(comm,
                      make_schedule(problem(), layouts, comm.rank(), {kHeads, kHeads}, {.kind = ScheduleKind::ring}),
                      {.observer = [&](const StepEvent& e) {
                        seen[at(comm.rank())].push_back(e);
                        observer(e);
                      }});
    executor.forward({.q = view(q), .k = view(q), .v = view(q), .out = view(out)});
  });
  const std::vector<Event> events = events_of(trace.json());
  expect_nested(events);
  for (Index rank = 0; rank < kRanks; ++rank) {
    std::vector<Event> mine;
    for (const Event& e : events)
      if (e.pid == rank + 1) mine.push_back(e);
    std::sort(mine.begin(), mine.end(), [](const Event& a, const Event& b) { return a.begin < b.begin; });
    const std::vector<StepEvent>& want = seen[at(rank)];
    ASSERT_EQ(mine.size(), want.size());
    ASSERT_GT(want.size(), 1U);
    for (std::size_t i = 0; i < mine.size(); ++i) {
      const bool compute = want[i].kind == StepEvent::Kind::compute;
      EXPECT_EQ(mine[i].name, std::string(compute ? "forward attend, step " : "forward wait for keys, step ") +
                                  std::to_string(want[i].step));
      EXPECT_EQ(mine[i].tid, compute ? 1 : 2);
      EXPECT_NEAR(mine[i].end - mine[i].begin, (want[i].end - want[i].begin) * 1e6, 2e-3);
    }
  }
}

}  // namespace
}  // namespace weft
