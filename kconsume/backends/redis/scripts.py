"""The steps of the Redis store, as Lua scripts. While a server runs a script, it runs no other script or command.

This module has only the texts: `connection` sends the scripts, and `store` reads the replies. All scripts follow three
rules:

- All checks come before the first write, because Redis cannot undo.
- The first write is a command that Redis refuses if it cannot write at all (a replica, no memory, no disk). So after
  such a refusal nothing has changed.
- Offsets and epochs are always text: a Lua number is exact only up to 2^53.

A script that refuses to write replies with a reason and rows: `fenced` with the first row that has another epoch or
offset, `failed` with rows that have a failed record.

A row is a hash. `APPLY` sets the field `failed_offset` before the first queued command, and removes the field after the
last one. If a command fails, the fields `failed_…` describe its record, and stay until a user has decided about this
record.
"""

from __future__ import annotations

import hashlib

SCHEMA_VERSION = "1"

POSITION = (
    "next", "epoch", "topic_id", "owner", "leader_epoch", "metadata", "updated_at", "generation", "reset_epoch",
)  # fmt: skip
FAILURE = (
    "failed_offset", "failed_end", "failed_index", "failed_of", "failed_command", "failed_error", "failed_at",
)  # fmt: skip


class Script:
    """A script: its text, and the digest under which a server caches it."""

    __slots__ = ("digest", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def _quoted(names: tuple[str, ...]) -> str:
    return ", ".join(f"'{name}'" for name in names)


_ROW = f"""
local function row_of(key)
  return redis.call('HMGET', key, {_quoted(POSITION + FAILURE)})
end
"""

_BELOW = """
local function below(a, b)  -- true if a < b; both are numbers as text, without a sign
  return #a < #b or (#a == #b and a < b)
end
"""

# Reads the queued commands from front to back without building Lua tables: two tables for each record would cost the
# server as much as the record's own command. `QueuedPipeline.packed` writes this format. The text of an offset is
# shorter than 32 bytes, so one byte before the text has its length.
_QUEUED = """
local queued, byte, words_of, pcall = ARGV[6], string.byte, cmsgpack.unpack_limit, redis.pcall
local record = {}  -- where the parts of the current record begin: its offset, its end, its commands
local function array(at)  -- returns the number of elements of an array, and where the first element begins
  local head = byte(queued, at + 1)
  if head < 0xa0 then
    return head - 0x90, at + 1
  end
  local a, b, c, d = byte(queued, at + 2, at + 5)
  if head == 0xdc then
    return a * 256 + b, at + 3
  end
  return ((a * 256 + b) * 256 + c) * 256 + d, at + 5
end
local function run(i, behind, ...)  -- runs the command in part i: its words are `...`, the next part begins at `behind`
  record[i + 1] = behind
  return pcall(...)
end
"""

# The hash `meta` has a field `deleted:GROUP:MEMBER` with the epoch of each deleted row. No member contains a colon. The
# empty member stands for the partitions of the group that had no row. If a row is created again, its higher epochs do
# not count as deleted.
_RECORD_NEW_ROW = """
local function record_new_row(group, member, last_epoch)
  local gone = 'deleted:' .. group .. ':'
  local held = redis.call('HMGET', KEYS[1], gone, gone .. member)
  if held[1] or held[2] then
    redis.call('HSET', KEYS[1], gone .. member, last_epoch)
  end
end
"""

# KEYS: rows. Replies with each row; the fields of a missing row are all nil.
LOAD = Script(
    _ROW
    + """
local rows = {}
for i, key in ipairs(KEYS) do
  rows[i] = row_of(key)
end
return rows
"""
)

# True if a row accepts a claim, by the same rule as `claim.accepts`. Generations are small enough for Lua numbers.
_ACCEPTS = """
local function accepts(epoch, row_generation, row_owner, owner, generation, expected)
  if generation == '' then
    return true
  end
  if expected ~= '' then
    return epoch == expected
  end
  if not epoch or not row_generation or tonumber(row_generation) < tonumber(generation) then
    return true
  end
  return row_generation == generation and (not row_owner or row_owner == owner)
end
"""

# KEYS: meta, groups, members, rows. ARGV: group, owner, now, version, generation or ''; for each row: member, next,
# topic_id, leader_epoch, the epoch that the row must have or ''. Replies with all rows, and the indices of the refused
# rows.
CLAIM = Script(
    _ROW
    + _ACCEPTS
    + _RECORD_NEW_ROW
    + """
local missing, failed, rows_of_failed, late = {}, {}, {}, {}
for i = 4, #KEYS do
  local at = 6 + (i - 4) * 5
  local held = redis.call('HMGET', KEYS[i], 'epoch', 'failed_offset', 'generation', 'owner')
  if not accepts(held[1], held[3], held[4], ARGV[2], ARGV[5], ARGV[at + 4]) then
    late[i] = true
  elseif held[2] then
    failed[#failed + 1], rows_of_failed[#failed + 1] = i - 3, row_of(KEYS[i])
  elseif not held[1] and ARGV[at + 1] == '' then
    missing[#missing + 1] = i - 3
  end
end
if #failed > 0 then
  return {'failed', failed, rows_of_failed}
end
if #missing > 0 then
  return {'missing', missing}
end
redis.call('HSETNX', KEYS[1], 'version', ARGV[4])
local last_epoch = redis.call('HGET', KEYS[1], 'last_epoch') or '0'
local rows, refused = {}, {}
for i = 4, #KEYS do
  local key, at = KEYS[i], 6 + (i - 4) * 5
  if late[i] then
    refused[#refused + 1] = i - 3
  else
    if redis.call('EXISTS', key) == 0 then
      record_new_row(ARGV[1], ARGV[at], last_epoch)
      redis.call('HSET', key, 'next', ARGV[at + 1], 'epoch', last_epoch, 'reset_epoch', last_epoch, 'metadata', '')
      if ARGV[at + 2] ~= '' then redis.call('HSET', key, 'topic_id', ARGV[at + 2]) end
      if ARGV[at + 3] ~= '' then redis.call('HSET', key, 'leader_epoch', ARGV[at + 3]) end
      redis.call('SADD', KEYS[3], ARGV[at])
    end
    redis.call('HINCRBY', key, 'epoch', 1)
    redis.call('HSET', key, 'owner', ARGV[2], 'updated_at', ARGV[3])
    if ARGV[5] ~= '' then redis.call('HSET', key, 'generation', ARGV[5]) end
  end
  rows[i - 3] = row_of(key)
end
if #refused < #rows then redis.call('SADD', KEYS[2], ARGV[1]) end
return {'done', rows, refused}
"""
)

# KEYS: rows. ARGV: owner, now; for each row: epoch.
RECLAIM = Script(
    _ROW
    + """
local failed, rows_of_failed = {}, {}
for i, key in ipairs(KEYS) do
  local held = redis.call('HMGET', key, 'epoch', 'failed_offset')
  if held[1] ~= ARGV[2 + i] then
    return {'fenced', {i}, {row_of(key)}}
  end
  if held[2] then
    failed[#failed + 1], rows_of_failed[#failed + 1] = i, row_of(key)
  end
end
if #failed > 0 then
  return {'failed', failed, rows_of_failed}
end
local rows = {}
for i, key in ipairs(KEYS) do
  redis.call('HINCRBY', key, 'epoch', 1)
  redis.call('HSET', key, 'owner', ARGV[1], 'updated_at', ARGV[2])
  rows[i] = row_of(key)
end
return {'done', rows}
"""
)

# KEYS: rows. ARGV: now; for each row: epoch, next, topic_id, leader_epoch, previous or ''.
SAVE = Script(
    _ROW
    + _BELOW
    + """
for i, key in ipairs(KEYS) do
  local at = 2 + (i - 1) * 5
  local held = redis.call('HMGET', key, 'epoch', 'next', 'failed_offset')
  local previous = ARGV[at + 4]
  local seen = previous == '' or held[2] == previous or held[2] == ARGV[at + 1]
  if held[1] ~= ARGV[at] or below(ARGV[at + 1], held[2]) or not seen then
    return {'fenced', {i}, {row_of(key)}}
  end
  if held[3] then
    return {'failed', {i}, {row_of(key)}}
  end
end
for i, key in ipairs(KEYS) do
  local at = 2 + (i - 1) * 5
  redis.call('HSET', key, 'next', ARGV[at + 1], 'updated_at', ARGV[1])
  if ARGV[at + 2] ~= '' then redis.call('HSET', key, 'topic_id', ARGV[at + 2]) end
  if ARGV[at + 3] ~= '' then
    redis.call('HSET', key, 'leader_epoch', ARGV[at + 3])
  else
    redis.call('HDEL', key, 'leader_epoch')
  end
end
return {'done'}
"""
)

# KEYS: meta, groups, members, rows. ARGV: group, now, version; for each row: member, next.
RESET = Script(
    _RECORD_NEW_ROW
    + f"""
redis.call('HSETNX', KEYS[1], 'version', ARGV[3])
local last_epoch = redis.call('HGET', KEYS[1], 'last_epoch') or '0'
for i = 4, #KEYS do
  local key, at = KEYS[i], 4 + (i - 4) * 2
  if redis.call('EXISTS', key) == 0 then
    record_new_row(ARGV[1], ARGV[at], last_epoch)
    redis.call('HSET', key, 'epoch', last_epoch, 'metadata', '')
    redis.call('SADD', KEYS[3], ARGV[at])
  end
  redis.call('HINCRBY', key, 'epoch', 1)
  local epoch = redis.call('HGET', key, 'epoch')
  redis.call('HSET', key, 'next', ARGV[at + 1], 'reset_epoch', epoch, 'updated_at', ARGV[2])
  redis.call('HDEL', key, 'topic_id', 'owner', 'leader_epoch', {_quoted(FAILURE)})
end
redis.call('SADD', KEYS[2], ARGV[1])
return {{'done'}}
"""
)

# KEYS: meta, groups, members, rows. ARGV: group; for each row: member. Replies with the number of rows that the group
# still has. `last_epoch` is the highest epoch of all deleted rows. New rows get a higher epoch, so that no epoch is
# used twice and a zombie from before the delete stays fenced.
DELETE = Script(
    _BELOW
    + """
local last_epoch = redis.call('HGET', KEYS[1], 'last_epoch') or '0'
for i = 4, #KEYS do
  local epoch = redis.call('HGET', KEYS[i], 'epoch')
  if epoch and below(last_epoch, epoch) then
    last_epoch = epoch
  end
  redis.call('HSET', KEYS[1], 'deleted:' .. ARGV[1] .. ':' .. ARGV[i - 2], epoch or '9223372036854775807')
end
redis.call('HSET', KEYS[1], 'last_epoch', last_epoch)
for i = 4, #KEYS do
  redis.call('DEL', KEYS[i])
  redis.call('SREM', KEYS[3], ARGV[i - 2])
end
local left = redis.call('SCARD', KEYS[3])
if left == 0 then
  redis.call('SREM', KEYS[2], ARGV[1])
end
return left
"""
)

# KEYS: the row; on a cluster also `nothing` and the keys of the queued commands. ARGV: epoch, old offset, new offset,
# leader_epoch, the current time, and the queue: [[offset, end, command, …], …] in MessagePack.
APPLY = Script(
    _ROW
    + _QUEUED
    + """
local key = KEYS[1]
local held = redis.call('HMGET', key, 'epoch', 'next', 'failed_offset')
if held[1] ~= ARGV[1] then
  return {'fenced', {1}, {row_of(key)}}
end
if held[3] then
  return {'failed', {1}, {row_of(key)}}
end
if held[2] ~= ARGV[2] then
  return {'fenced', {1}, {row_of(key)}}
end
redis.call('HSET', key, 'failed_offset', ARGV[2], 'failed_end', ARGV[3])
local records, at = array(0)
for _ = 1, records do
  local parts, first = array(at)
  record[1], record[2] = first, first + byte(queued, first + 1) - 0x9f
  record[3] = record[2] + byte(queued, record[2] + 1) - 0x9f
  for i = 3, parts do
    local command = record[i]
    local count, word = array(command)
    local reply = run(i, words_of(queued, count, word))
    if type(reply) == 'table' and reply.err then
      local _, offset, behind = words_of(queued, 2, first)
      local _, name, argument = words_of(queued, math.min(count, 2), word)
      redis.call('HSET', key, 'next', offset, 'failed_offset', offset, 'failed_end', behind,
        'failed_index', i - 2, 'failed_of', parts - 2, 'failed_error', reply.err,
        'failed_command', name .. ' ' .. string.sub(argument or '', 1, 200), 'failed_at', ARGV[5])
      return {'failed', {1}, {row_of(key)}}
    end
  end
  at = record[parts + 1]
end
redis.call('HSET', key, 'next', ARGV[3], 'updated_at', ARGV[5])
redis.call('HDEL', key, 'failed_offset', 'failed_end')
if ARGV[4] ~= '' then
  redis.call('HSET', key, 'leader_epoch', ARGV[4])
else
  redis.call('HDEL', key, 'leader_epoch')
end
return {'done'}
"""
)

# KEYS: a key that exists neither before nor after the script. Runs every command that the other scripts use, so that a
# Redis user without the right to one of these commands gets the error here, and not in the middle of a record. DEL is
# checked first, because the script removes the key with DEL.
TRY_RIGHTS = Script(
    """
local key, refused = KEYS[1], nil
redis.call('DEL', key)
local function try(...)
  local reply = redis.pcall(...)
  if type(reply) == 'table' and reply.err then
    refused = refused or reply
  end
end
try('EXISTS', key)
try('HSETNX', key, 'number', 1)
try('HSET', key, 'number', 1)
try('HINCRBY', key, 'number', 1)
try('HGET', key, 'number')
try('HMGET', key, 'number')
try('HDEL', key, 'number')
redis.call('DEL', key)
try('SADD', key, 'member')
try('SCARD', key)
try('SREM', key, 'member')
redis.call('DEL', key)
return refused or {'done'}
"""
)

# KEYS: the row. ARGV: (1) `skip` or `retry`; (2) the offset of the failed record that the user has seen, or '' for any;
# (3) the current time.
DECIDE = Script(
    f"""
local key = KEYS[1]
local held = redis.call('HMGET', key, 'failed_offset', 'failed_end')
if not held[1] then
  return {{'none'}}
end
if ARGV[2] ~= '' and ARGV[2] ~= held[1] then
  return {{'other', held[1]}}
end
redis.call('HINCRBY', key, 'epoch', 1)
redis.call('HSET', key, 'updated_at', ARGV[3])
if ARGV[1] == 'skip' then
  redis.call('HSET', key, 'next', held[2])
end
redis.call('HDEL', key, 'owner', 'leader_epoch', {_quoted(FAILURE)})
return {{'done'}}
"""
)
