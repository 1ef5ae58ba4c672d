// The steps of all-gather and ring and the chunks of sequences, made on the device, against the host's.
#include <numeric>

#include "cuda/device_array.h"
#include "refusal.h"
#include "weft/device_rows.h"

namespace weft {
namespace {

using Bytes = std::vector<std::uint8_t>;
using Indices = std::vector<Index>;

std::vector<std::int32_t> narrow(const Indices& wide) {
  std::vector<std::int32_t> out;
  for (const Index v : wide) out.push_back(device_bound(v));
  return out;
}

struct StepArrays {
  using Array = DeviceArray<std::int32_t>;
  Index capacity;
  Array cu_q, cu_k, cu_qp, cu_kp, used_q, used_k, lo, hi, sequence, count;

  explicit StepArrays(Index n)
      : capacity(n),
        cu_q(at(n + 1)),
        cu_k(at(n + 1)),
        cu_qp(at(n + 1)),
        cu_kp(at(n + 1)),
        used_q(at(n)),
        used_k(at(n)),
        lo(at(n)),
        hi(at(n)),
        sequence(at(n)),
        count(3) {}
  DeviceStep out() const {
    return {capacity,     cu_q.get(), cu_k.get(), cu_qp.get(),    cu_kp.get(), used_q.get(),
            used_k.get(), lo.get(),   hi.get(),   sequence.get(), count.get()};
  }
};

// The array holds `wanted`, and then its last element or `rest` up to its end.
void expect_array(const StepArrays::Array& array, const Indices& wanted, bool ends, std::int32_t rest,
                  const std::string& what) {
  std::vector<std::int32_t> all = narrow(wanted);
  all.resize(array.size(), ends ? all.back() : rest);
  ASSERT_EQ(array.host(), all) << what;
}

void expect_step(const StepArrays& device, const VarlenStep& host, const std::string& what) {
  ASSERT_EQ(device.count.host(), narrow({host.entries(), host.max_seqlen_q, host.max_seqlen_k})) << what;
  expect_array(device.cu_q, host.cu_seqlens_q, true, 0, what);
  expect_array(device.cu_k, host.cu_seqlens_k, true, 0, what);
  expect_array(device.cu_qp, host.cu_seqlens_q_padded, true, 0, what);
  expect_array(device.cu_kp, host.cu_seqlens_k_padded, true, 0, what);
  expect_array(device.used_q, host.seqused_q, false, 0, what);
  expect_array(device.used_k, host.seqused_k, false, 0, what);
  expect_array(device.lo, host.lo, false, -kDeviceUnlimited, what);
  expect_array(device.hi, host.hi, false, kDeviceUnlimited, what);
  expect_array(device.sequence, host.sequence, false, -1, what);
}

TEST(DeviceSteps, EqualTheHosts) {
  DeviceContext context(gpu());
  for (unsigned long long seed = 0; seed < random_problems(1500); ++seed) {
    check::RandomChoices choices(seed);
    check::Case c = random_case(choices, LayoutKind::dual_chunk);
    c.mask.slices.reset();
    if (seed % 2 == 0) c.mask.chunk = choices.pick(1, 20);
    const Problem p = problem_of(c);
    const Layouts l = layouts_of(c, p);
    const bool wide = choices.one_in(2);
    const DeviceOffsets q(c.q, p.packing().q(), wide), k(c.k ? *c.k : c.q, p.packing().k(), wide);
    DeviceStepArgs args{q.stream(), k.stream(), c.mask, {LayoutKind::dual_chunk, c.ranks, l.q.rows()}, 0, 0};
    args.rank = choices.pick(0, c.ranks - 1);
    args.step = choices.pick(0, 1);
    const StepArrays gathered(device_step_capacity(args));
    all_gather_step(context, args, gathered.out());
    expect_step(gathered, all_gather_step(p, l.q, args.rank, args.step), flags(c));
    args.mask = {.causal = true, .chunk = c.mask.chunk};
    args.k = {};
    args.step = choices.pick(0, c.ranks - 1);
    const StepArrays ring(device_step_capacity(args));
    ring_step(context, args, ring.out());
    expect_step(ring, ring_step(Problem(p.packing().q(), args.mask), l.q, args.rank, args.step), flags(c));
    const Index chunk = choices.pick(1, 12), room = device_chunks_capacity(q.stream(), chunk);
    const Chunks host = sequences_to_chunks(p.packing().q(), chunk);
    const StepArrays chunks(room);
    sequences_to_chunks(context, q.stream(), chunk,
                        {room, chunks.cu_q.get(), chunks.cu_qp.get(), chunks.sequence.get(), chunks.count.get()});
    expect_array(chunks.cu_q, host.cu_seqlens, true, 0, flags(c));
    expect_array(chunks.cu_qp, host.cu_seqlens_padded, true, 0, flags(c));
    expect_array(chunks.sequence, host.sequence, false, -1, flags(c));
    ASSERT_EQ(chunks.count.host()[0], static_cast<std::int32_t>(host.sequence.size()));
    ASSERT_NO_THROW(context.check()) << flags(c);
  }
}

TEST(DeviceSteps, ManySequences) {
  DeviceContext context(gpu());
  Indices lengths;
  for (Index i = 0; i < 100000; ++i) lengths.push_back(8 * (i * 7919 % 5));
  const Problem p(Stream::from_lengths(lengths), {.causal = true, .chunk = 7});
  const Layout l = Layout::dual_chunk(p.packing().q(), 4);
  const Stream& s = p.packing().q();
  const DeviceOffsets offsets(Indices(s.offsets().begin(), s.offsets().end()), {}, s.tokens(), false);
  const DeviceStepArgs args{offsets.stream(), {}, p.mask(), {LayoutKind::dual_chunk, 4}, 1, 1};
  const StepArrays step(device_step_capacity(args));
  all_gather_step(context, args, step.out());
  expect_step(step, all_gather_step(p, l, 1, 1), "many");
  ring_step(context, args, step.out());
  expect_step(step, ring_step(p, l, 1, 1), "many");
  const StepArrays chunks(device_chunks_capacity(offsets.stream(), 7));
  sequences_to_chunks(
      context, offsets.stream(), 7,
      {chunks.capacity, chunks.cu_q.get(), chunks.cu_qp.get(), chunks.sequence.get(), chunks.count.get()});
  expect_array(chunks.cu_q, sequences_to_chunks(s, 7).cu_seqlens, true, 0, "many");
  ASSERT_NO_THROW(context.check());
}

TEST(DeviceSteps, WrongOffsetsGiveNothing) {
  DeviceContext context(gpu());
  const DeviceOffsets wrong({0, 8, 18, 32}, {}, 32, false);
  const DeviceStepArgs args{wrong.stream(), {}, {.causal = true}, {LayoutKind::dual_chunk, 2}, 0, 0};
  const StepArrays step(device_step_capacity(args));
  all_gather_step(context, args, step.out());
  EXPECT_EQ(step.count.host(), (std::vector<std::int32_t>{0, 0, 0}));
  expect_array(step.used_q, {}, false, 0, "wrong");
  expect_refusal([&] { ring_step(context, args, step.out()); }, {"sequence 1: padded length 10"});
}

TEST(DeviceSteps, AGraphReplaysThemWithRows) {
  const TestStream stream;
  DeviceContext context(gpu(stream.stream));
  const Index sequences = 16, tokens = 16 * 48, ranks = 4;
  DeviceArray<std::int32_t> cu(at(sequences + 1));
  const DeviceStream s{cu.get(), nullptr, OffsetType::i32, sequences, tokens};
  const DeviceLayout layout{LayoutKind::zigzag, ranks}, dual{LayoutKind::dual_chunk, ranks};
  std::vector<float> values(at(tokens * 4));
  std::iota(values.begin(), values.end(), 0.0f);
  const DeviceArray<float> whole(values), local(values.size()), back(values.size());
  const DeviceArray<bf16> rounded(values.size());
  const DeviceArray<std::uint8_t> mask(at(tokens));
  const DeviceStepArgs args{s, {}, {.causal = true}, dual, 1, 0};
  const StepArrays step(device_step_capacity(args));
  stream.wait();
  const cudaGraphExec_t graph = capture(stream.stream, [&] {
    sequence_to_rank_order(context, s, layout, {whole.get(), tokens, 16}, {local.get(), tokens, 16});
    rank_to_sequence_order(context, s, layout, {local.get(), tokens, 16}, {back.get(), tokens, 16});
    round_rows(context, thd(back.get(), DType::f32, tokens, 1, 4), thd(rounded.get(), DType::bf16, tokens, 1, 4));
    valid_rows(context, s, mask.get());
    all_gather_step(context, args, step.out());
  });
  for (const Index length : {8, 48, 16}) {
    const Stream host = Stream::from_lengths(Indices(at(sequences), length));
    cu.set(std::vector<std::int32_t>(host.offsets().begin(), host.offsets().end()));
    expect_ok(cudaMemset(back.get(), 0, values.size() * 4));
    expect_ok(cudaDeviceSynchronize());
    expect_ok(cudaGraphLaunch(graph, stream.stream));
    stream.wait();
    const std::vector<bf16> out = rounded.host();
    for (std::size_t i = 0; i < out.size(); ++i) {
      const bool held = static_cast<Index>(i) / 4 < host.tokens();
      ASSERT_EQ(static_cast<float>(out[i]), held ? static_cast<float>(bf16(values[i])) : 0.0f) << i;
    }
    Bytes valid = valid_rows(host);
    valid.resize(at(tokens), 0);
    ASSERT_EQ(mask.host(), valid);
    const VarlenStep wanted = all_gather_step(Problem(host, args.mask), Layout::dual_chunk(host, ranks), 1, 0);
    expect_step(step, wanted, "graph");
    ASSERT_NO_THROW(context.check());
  }
  cudaGraphExecDestroy(graph);
}

}  // namespace
}  // namespace weft
