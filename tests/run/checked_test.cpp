// Ranks that disagree, on purpose: with `checked` every rank gets the same Error, which names what differs and on which
// ranks, also where the fingerprint of a pass (disagreement_test.cpp) does not show it and numbers are wrong.
#include <deque>
#include <functional>
#include <string>

#include <gtest/gtest.h>

#include "prepare/kv_sequences.h"
#include "ranks.h"
#include "refusal.h"

namespace weft::test {
namespace {

constexpr Index kRanks = 4, kOdd = 1;

// What each rank of a run was told, which must be the same.
std::string said(const std::function<void(Communicator&)>& body) {
  std::vector<std::string> texts(kRanks);
  run_ranks(kRanks, [&](Communicator& comm) { texts[index(comm.rank())] = error_of([&] { body(comm); }); },
            {.time_limit = 30});
  for (const std::string& t : texts) EXPECT_EQ(t, texts[0]);
  return texts[0];
}

bool begins(const std::string& text, const std::string& with) {
  EXPECT_EQ(text.substr(0, with.size()), with);
  return text.starts_with(with);
}

const Problem& problem() {
  static const Problem causal(Stream::from_lengths(std::vector<Index>{150, 17, 25, 64}), {.causal = true});
  return causal;
}

// The tensors of one layer on one rank.
struct Layer : RankTensors<> {
  Layer(const Layouts& layouts, Index rank, unsigned seed) : Layer(layouts, rank, problem_of(seed)) {}

  ExecutorForwardArgs forward(Index number = kNoLayer) const {
    RankArgs both = args();
    both.forward.layer = number;
    return both.forward;
  }
  ExecutorBackwardArgs backward(Index number = kNoLayer) const {
    RankArgs both = args();
    both.backward.layer = number;
    return both.backward;
  }

 private:
  Layer(const Layouts& layouts, Index rank, const RanksProblem& p) : RankTensors<>(sizes_of(p, layouts)) {
    RanksInput in(p);
    shard(layouts, rank, in, *this);
  }
  static RanksProblem problem_of(unsigned seed) {
    return {.problem = problem(), .heads_q = 4, .heads_k = 4, .dim_qk = 8, .dim_v = 8, .seed = seed};
  }
};

Executor executor_of(Communicator& comm, const Layouts& layouts, bool checked, const ScheduleOptions& how = {},
                     const std::string& kernel = {}) {
  return Executor(comm, make_schedule(problem(), layouts, comm.rank(), {4, 4}, how),
                  {.kernel = kernel, .checked = checked});
}

Layouts zigzag() { return make_layouts(LayoutKind::zigzag, problem(), kRanks); }

// A run of all ranks, and what came out of it on every rank.
struct Ran {
  std::string error;
  std::vector<std::vector<std::byte>> out = std::vector<std::vector<std::byte>>(kRanks);
};

// What a rank does; `odd` is what rank 1 does otherwise.
struct Call {
  Layouts layouts = zigzag();
  std::string kernel = "cpu.scalar";
  ExecutorForwardArgs args = {};
};
using Plant = std::function<void(bool odd, Call&)>;
Ran one_forward(bool checked, const Plant& plant, bool planted, const ScheduleOptions& how) {
  Ran run;
  run.error = said([&](Communicator& comm) {
    const bool odd = planted && comm.rank() == kOdd;
    Call call;
    plant(odd, call);  // the layouts, before there are tensors
    const Layer layer(call.layouts, comm.rank(), 1);
    call.args = layer.forward();
    plant(odd, call);
    Executor executor = executor_of(comm, call.layouts, checked, how, call.kernel);
    executor.forward(call.args);
    run.out[index(comm.rank())] = layer.out.bytes;
  });
  return run;
}

// Checked, all are told. `silent`: unchecked, nobody is, and bits of other ranks' results move.
void expect_told(const Plant& plant, const std::string& text, bool silent, const ScheduleOptions& how = {}) {
  const Ran right = one_forward(false, plant, false, how);
  EXPECT_EQ(right.error, "");
  if (silent) {
    const Ran wrong = one_forward(false, plant, true, how);
    EXPECT_EQ(wrong.error, "");
    EXPECT_NE(right.out, wrong.out);
  }
  begins(one_forward(true, plant, true, how).error, text);
  const Ran checked = one_forward(true, plant, false, how);
  EXPECT_EQ(checked.error, "");
  EXPECT_EQ(checked.out, right.out);
}

TEST(Checked, ALayoutDealtByAnotherMask) {
  expect_told(
      [](bool odd, Call& call) {
        const Problem by(problem().packing(), odd ? Mask{} : Mask{.causal = true});
        call.layouts = {Layout::balanced(by, kRanks), Layout::balanced(by, kRanks)};
      },
      "layout: rank 1 differs from ranks 0, 2, 3", false);
}

TEST(Checked, OtherValuesOfASink) {
  static const std::vector<float> usual{1, 2, 3, 4}, others{1, 2, 3, 5};
  expect_told(
      [](bool odd, Call& call) {
        call.args.attention.sink = Sink::learnable(per_head((odd ? others : usual).data(), DType::f32, 4));
      },
      "values of the sink: rank 1 differs from ranks 0, 2, 3", true);
}

// Told before anything is asked of a GPU, which need not be there.
TEST(Checked, TensorsOfAnotherPlace) {
  const auto place_of = [](const Communicator& comm) {
    return Place{.kind = comm.rank() == kOdd ? DeviceKind::cuda : DeviceKind::cpu};
  };
  const std::string text = "where tensors lie (CPU or GPU): rank 1 differs from ranks 0, 2, 3";
  begins(said([&](Communicator& comm) {
           Executor(comm, make_schedule(problem(), zigzag(), comm.rank(), {4, 4}),
                    {.checked = true, .place = place_of(comm)});
         }),
         text);
  begins(said([&](Communicator& comm) {
           KvBuffer(comm, {.rows = 4, .heads = 1, .dim_qk = 4, .dim_v = 4, .place = place_of(comm), .checked = true});
         }),
         text);
}

TEST(Checked, AnotherKernel) {
  expect_told([](bool odd, Call& call) { call.kernel = odd ? "reference" : "cpu.scalar"; },
              "kernel: rank 1 differs from ranks 0, 2, 3", true);
}

// Heads that are swapped carry what the tensors of other ranks will hold: two bytes of bf16 are not two of f16.
TEST(Checked, OutputsOfAnotherType) {
  expect_told([](bool odd, Call& call) { call.args.out.dtype = odd ? DType::f16 : DType::bf16; },
              "dtype of out and lse: rank 1 differs from ranks 0, 2, 3", false, {.kind = ScheduleKind::all_to_all});
}

TEST(Checked, DeterministicOnSomeRanks) {
  const std::string told = said([&](Communicator& comm) {
    Executor(comm, make_schedule(problem(), zigzag(), comm.rank(), {4, 4}),
             {.deterministic = comm.rank() == kOdd, .checked = true});
  });
  begins(told, "deterministic: rank 1 differs from ranks 0, 2, 3");
}

// ---- ranks that are out of step

struct Steps {
  std::vector<Index> forward = {0, 1, 2, 3}, backward = {3, 2, 1, 0};
};

// Layers of a model through one executor; rank 1 goes another way.
Ran layers(const Steps& usual, const Steps& odd, bool checked, bool tagged, ScheduleKind kind = ScheduleKind::ring) {
  Ran run;
  run.error = said([&](Communicator& comm) {
    const Steps& mine = comm.rank() == kOdd ? odd : usual;
    const Layouts layouts = zigzag();
    std::deque<Layer> all;
    for (unsigned n = 0; n < 4; ++n) all.emplace_back(layouts, comm.rank(), n + 1);
    Executor executor = executor_of(comm, layouts, checked, {.kind = kind});
    for (const Index n : mine.forward) executor.forward(all[index(n)].forward(tagged ? n : kNoLayer));
    for (const Index n : mine.backward) executor.backward(all[index(n)].backward(tagged ? n : kNoLayer));
    std::vector<std::byte>& bytes = run.out[index(comm.rank())];
    for (const Layer& layer : all) {
      bytes.insert(bytes.end(), layer.out.bytes.begin(), layer.out.bytes.end());
      bytes.insert(bytes.end(), layer.dk.bytes.begin(), layer.dk.bytes.end());
    }
  });
  return run;
}

TEST(Checked, ARankOneLayerOutOfStep) {
  for (const ScheduleKind kind : schedule_kinds()) {
    const Ran right = layers({}, {}, false, false, kind);
    // Rank 1 leaves out layer 2, and makes layer 3 twice, so that it ends with the others.
    const Steps skips{.forward = {0, 1, 3, 3}};
    const Ran silent = layers({}, skips, false, false, kind);
    EXPECT_EQ(silent.error, "");
    EXPECT_NE(silent.out, right.out);
    begins(layers({}, skips, true, true, kind).error,
           "call 6: rank 1 is at the forward of layer 3, ranks 0, 2, 3 are at the forward of layer 2; let every rank");
    const Ran checked = layers({}, {}, true, true, kind);
    EXPECT_EQ(checked.error, "");
    EXPECT_EQ(checked.out, right.out);
  }
  begins(layers({}, {.forward = {0, 1, 1, 2, 3}}, true, true).error,
         "call 6: rank 1 is at the forward of layer 1, ranks 0, 2, 3 are at the forward of layer 2");
  begins(layers({}, {.backward = {3, 1, 2, 0}}, true, true).error,
         "call 12: rank 1 is at the backward of layer 1, ranks 0, 2, 3 are at the backward of layer 2");
  // A call less, and the pass itself tells: also without numbers of layers.
  begins(layers({}, {.forward = {0, 1, 3}}, true, false).error,
         "call 8: rank 1 is at the backward, ranks 0, 2, 3 are at the forward");
}

// Without numbers of layers too: each rank knows which of its forwards wrote what the backward is given.
TEST(Checked, ABackwardOfAnotherForward) {
  const Steps swapped{.backward = {3, 1, 2, 0}};
  const Ran right = layers({}, {}, false, false), silent = layers({}, swapped, false, false);
  EXPECT_EQ(silent.error, "");
  EXPECT_NE(silent.out, right.out);
  begins(layers({}, swapped, true, false).error,
         "the backward: out and lse are those of call 4 on rank 1, call 6 on ranks 0, 2, 3");
  // Also where layers were computed twice, and results are those of two calls.
  const Steps twice{.forward = {0, 1, 2, 3, 2, 1}}, odd{.forward = {0, 1, 2, 3, 2, 1}, .backward = {3, 1, 2, 0}};
  begins(layers(twice, odd, true, false).error,
         "the backward: out and lse are those of call 12 on rank 1, call 10 on ranks 0, 2, 3");
  const Steps again{.forward = {0, 1, 2, 3, 3, 2}, .backward = {2, 2, 0, 3, 1}};  // any order that is everybody's
  EXPECT_EQ(layers(again, again, true, false).error, "");
}

TEST(Checked, ExecutorsOfLayersAreToldApart) {
  const std::string told = said([&](Communicator& comm) {
    const Layouts layouts = zigzag();
    Executor first = executor_of(comm, layouts, true), second = executor_of(comm, layouts, true);
    Layer layer(layouts, comm.rank(), 1);
    first.forward(layer.forward());
    (comm.rank() == kOdd ? first : second).forward(layer.forward());
  });
  begins(
      told,
      "call 5: rank 1 is at the forward (executor or buffer 1), ranks 0, 2, 3 are at the forward (executor or buffer "
      "2)");
}

// Ranks whose rows see nothing have the same results in every layer: nothing follows from that.
TEST(Checked, RanksThatSeeNothingDoNotCryWolf) {
  const Problem few(Stream::from_used(std::vector<Index>{0, 64}, std::vector<Index>{16}), {.causal = true});
  const Layouts layouts = make_layouts(LayoutKind::contiguous, few, kRanks);
  EXPECT_EQ(said([&](Communicator& comm) {
              Executor executor(comm, make_schedule(few, layouts, comm.rank(), {1, 1}), {.checked = true});
              std::deque<RankTensors<>> all;
              for (unsigned n = 0; n < 4; ++n) all.emplace_back(16, 1, 8, n + 1);
              for (const RankTensors<>& t : all) executor.forward(t.args().forward);
              for (const std::size_t n : {1, 3, 0, 2}) executor.backward(all[n].args().backward);
            }),
            "");
}

// ---- K/V buffers

const Setting kSetting{.lengths = {37, 5, 22, 64},
                       .ranks = kRanks,
                       .micros = 4,
                       .heads_q = 4,
                       .heads_k = 2,
                       .dim_qk = 8,
                       .dim_v = 8,
                       .sink = true};

KvBuffer buffer_of(Communicator& comm, const Setting& setting, bool checked, Index layer = kNoLayer) {
  KvBufferOptions options = options_of(setting, micros_of(setting));
  options.checked = checked;
  options.layer = layer;
  return KvBuffer(comm, options);
}

TEST(CheckedKvBuffer, RightResultsStayRight) {
  for (const bool drop : {false, true}) {
    for (const bool ahead : {false, true}) {
      Setting setting = kSetting;
      setting.drop = drop;
      setting.ahead = ahead;
      if (drop) setting.mask = {.causal = true, .left = 12};
      Tensors plain(setting), checked(setting);
      for (Tensors* t : {&plain, &checked}) {
        const std::string error = said([&](Communicator& comm) {
          KvBuffer buffer = buffer_of(comm, setting, t == &checked);
          for (int n = 0; n < 2; ++n) run_sequence(setting, micros_of(setting), buffer, comm, *t);
        });
        EXPECT_EQ(error, "");
      }
      for (const auto tensor : {&Tensors::out, &Tensors::dq, &Tensors::dk, &Tensors::dv})
        EXPECT_EQ((plain.*tensor).bytes, (checked.*tensor).bytes);
    }
  }
}

// Checked told. Unchecked silent and wrong, or told what differs: `unchecked` is then part of what some rank says, and
// all say something.
void expect_told(const std::function<void(Communicator&, bool planted, bool checked, Tensors&)>& body,
                 const std::string& text, const std::string& unchecked = "") {
  Tensors right(kSetting), wrong(kSetting), told(kSetting);
  EXPECT_EQ(said([&](Communicator& comm) { body(comm, false, false, right); }), "");
  std::vector<std::string> texts(kRanks);
  run_ranks(kRanks, [&](Communicator& comm) {
    texts[index(comm.rank())] = error_of([&] { body(comm, comm.rank() == kOdd, false, wrong); });
  });
  bool named = false;
  for (const std::string& t : texts) {
    EXPECT_EQ(t.empty(), unchecked.empty()) << t;
    named = named || t.find(unchecked) != std::string::npos;
  }
  EXPECT_TRUE(named) << texts[0];
  if (unchecked.empty()) {
    EXPECT_TRUE(right.out.bytes != wrong.out.bytes || right.dk.bytes != wrong.dk.bytes);
  }
  begins(said([&](Communicator& comm) { body(comm, comm.rank() == kOdd, true, told); }), text);
}

// Rank 1 has another setting than the others, and other micro-sequences if its lengths differ.
void expect_setting_told(const std::function<void(Setting&)>& change, const std::string& text,
                         const std::string& unchecked) {
  expect_told(
      [&](Communicator& comm, bool planted, bool checked, Tensors& t) {
        Setting mine = kSetting;
        if (planted) change(mine);
        KvBuffer buffer = buffer_of(comm, kSetting, checked);
        run_sequence(mine, micros_of(mine), buffer, comm, t);
      },
      text, unchecked);
}

TEST(CheckedKvBuffer, AnotherPacking) {
  expect_setting_told([](Setting& mine) { mine.lengths = {36, 6, 22, 64}; },
                      "packing: rank 1 differs from ranks 0, 2, 3", "rank 1 differs from ranks 0, 2, 3 in the packing");
}

TEST(CheckedKvBuffer, AnotherMask) {
  expect_setting_told([](Setting& mine) { mine.mask.left = 7; }, "mask: rank 1 differs from ranks 0, 2, 3",
                      "rank 1 differs from ranks 0, 2, 3 in the mask");
}

TEST(CheckedKvBuffer, OtherSettingsOfALayer) {
  expect_setting_told([](Setting& mine) { mine.softcap = 5; },
                      "attention (scale, softcap, sink, head_map): rank 1 differs",
                      "rank 1 differs from ranks 0, 2, 3 in the attention");
  expect_told(
      [](Communicator& comm, bool planted, bool checked, Tensors& t) {
        Tensors copy(kSetting);  // rank 1's logits of the sink are its own
        if (planted) copy.sink[2] += 1;
        KvBuffer buffer = buffer_of(comm, kSetting, checked);
        run_sequence(kSetting, micros_of(kSetting), buffer, comm, planted ? copy : t);
      },
      "values of the sink: rank 1 differs");
}

// Rank 1 leaves out the last micro-sequence and begins anew, or gathers once too often before the others do.
TEST(CheckedKvBuffer, ARankOneMicroSequenceOutOfStep) {
  const MicroSequences micros = micros_of(kSetting);
  const auto forward = [&](Communicator& comm, KvBuffer& buffer, Tensors& t, Index m) {
    buffer.forward(m, forward_args_with_keys(kSetting, t, micros.rows(comm.rank(), m)));
  };
  expect_told(
      [&](Communicator& comm, bool planted, bool checked, Tensors& t) {
        KvBuffer buffer = buffer_of(comm, kSetting, checked);
        buffer.begin(micros, kSetting.mask);
        for (Index m = 0; m < 4; ++m) {
          if (planted && m == 3) buffer.begin(micros, kSetting.mask);
          forward(comm, buffer, t, planted && m == 3 ? 0 : m);
        }
      },
      "call 9: rank 1 is at the begin of a sequence, ranks 0, 2, 3 are at the forward of micro-sequence 3",
      "in the number of the layer");
  const std::string told = said([&](Communicator& comm) {
    Tensors t(kSetting);
    KvBuffer buffer = buffer_of(comm, kSetting, true, 7);
    buffer.begin(micros, kSetting.mask);
    forward(comm, buffer, t, 0);
    const Range window = micros.rows(comm.rank(), 0);
    if (comm.rank() == kOdd) buffer.forward(0, forward_args(kSetting, t, window));  // once more
    forward(comm, buffer, t, 1);
  });
  begins(told,
         "call 5: rank 1 is at the forward of micro-sequence 0 of layer 7, ranks 0, 2, 3 are at the forward of "
         "micro-sequence 1 of layer 7");
}

TEST(CheckedKvBuffer, BuffersOfAnotherLayer) {
  const MicroSequences micros = micros_of(kSetting);
  expect_told(
      [&](Communicator& comm, bool planted, bool checked, Tensors& t) {
        KvBuffer first = buffer_of(comm, kSetting, checked, 0), second = buffer_of(comm, kSetting, checked, 1);
        Setting other = kSetting;
        other.seed = 2;
        Tensors more(other);
        for (KvBuffer* buffer : {&first, &second}) {  // rank 1 takes the layers the other way round
          const bool swaps = planted && buffer == &first, back = planted && buffer == &second;
          KvBuffer& mine = swaps ? second : back ? first : *buffer;
          run_sequence(kSetting, micros, mine, comm, &mine == &first ? t : more);
        }
      },
      "call 3: rank 1 is at the begin of a sequence of layer 1, ranks 0, 2, 3 are at the begin of a sequence of layer "
      "0",
      "in the number of the layer");
}

TEST(CheckedKvBuffer, ABackwardOfAnotherWindow) {
  const MicroSequences micros = micros_of(kSetting);
  expect_told(
      [&](Communicator& comm, bool planted, bool checked, Tensors& t) {
        KvBuffer buffer = buffer_of(comm, kSetting, checked);
        buffer.begin(micros, kSetting.mask);
        const auto window = [&](Index m) { return micros.rows(comm.rank(), m); };
        for (Index m = 0; m < 4; ++m) buffer.forward(m, forward_args_with_keys(kSetting, t, window(m)));
        for (Index m = 4; m-- > 0;) {
          KvBufferBackwardArgs args = backward_args(kSetting, t, window(m));
          if (planted && m == 2) {
            args.out = rows_of(t.out.view, window(1));
            args.lse = rows_of(t.lse.view, window(1));
          }
          buffer.backward(m, args);
        }
      },
      "the backward of micro-sequence 2: out and lse are those of call 5 on rank 1, call 7 on ranks 0, 2, 3");
}

}  // namespace
}  // namespace weft::test
