"""Proof that a bundle's output is the model's own.

`verification.verify` opens a bundle, climbs a ladder of 16 rungs and reports; `la-export verify`
is that on the command line, `testing.assert_lossless` a short form for test suites. Every rung is
climbed, whatever the ones below it found, and says what differed: the prompt, the position, the
tokens, the margin.

     1  contract and digests        every byte listed; graphs keep the contract, variants equal it,
                                    weights are the checkpoint's, number by number
     2  logits                      every position of every prompt, read in chunks with a cache, and
                                    tokens that no prompt holds; best scores against the logits
     3  epsilon                     the near-tie margin of this backend, measured
     4  padding and ragged batches  each sequence of a batch, and each request and sample of an
                                    engine whose requests come and go, against itself alone
     5  greedy equality             prompts x k x layouts x whose proposals, and prompts that take
                                    several passes to read, against plain decoding
     6  fixed width                 every pass at one width: tokens and logits bit for bit
     7  teacher-forced audit        what was emitted, read once by the plain model
     8  sampled equality            temperature, filters, penalties and bias, by seed; each token
                                    chosen once more by a sampler of the ladder's own
     9  no leak                     other lookahead vectors change no verified row, bit for bit
    10  slot logits                 slot (j, i) against [prefix, drafts to j, lookahead token i]
    11  cache audit                 unused places full of large random K/V change nothing
    12  endings                     end token, stop id, stop text and length inside a block
    13  tokenizer and template      every token, texts both ways, chats, against transformers
    14  last positions              logits at the end of the context, and running into it
    15  finite numbers              weights, vectors, logits of odd prompts
    16  perplexity                  with 0 and with 8 lookaheads present

On another backend than ONNX Runtime on the CPU there is one more:

    17  tensors                     scores and every layer's keys and values against that one's

The reference is PyTorch (`torch`: transformers' own code on the checkpoint) or the bundle itself
(`self`: its graph in plain causal passes, without cache, drafts, slots or padding, and without
torch). `self` vouches for everything decoding adds to the graph and not for the graph; rung 13 and
the parts of 1, 12 and 15 that need the checkpoint are left out, and said to be.

Untuned lookaheads hardly ever propose what the model says, so rungs 4 to 8, 11, 12 and 14 decode
twice: with the bundle's own proposals, and with given ones of which five in seven are right.

A *near-tie* excuses a difference: the margin of the reference there is below epsilon, four times
the largest difference of a logit between 1-row and wide passes, at most 1e-3. At most one place in
5,000 tokens is excused (one is always allowed); rungs 6, 9 and 11 excuse nothing. Where PyTorch
reads a text, the limit itself is the margin, because two implementations differ by more than two
widths of one.

`--quick` takes fewer prompts, tokens, seeds and positions and leaves some configurations of the
slow rungs out. It finds the same kinds of faults and gives no certificate: that takes a full run
of every k that was built, over the prompts that ship with the package, in which no rung failed and
none could not be run. A run of either kind that fails takes the backend's certificates away.
"""
